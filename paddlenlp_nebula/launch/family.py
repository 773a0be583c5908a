"""Processes that end with their parent, whatever ends it.

Linux offers two promises, and both are needed. A *child subreaper* inherits the orphans below it, so that a helper
whose own parent was killed can still be found and ended. A *parent death signal* ends a child whose parent was
killed itself and cannot clean up any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

import psutil

__all__ = ["Family", "die_with_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_AFTER_S = 10.0  # a process stuck in the kernel ignores even SIGKILL; waiting longer helps nobody
_libc = ctypes.CDLL(None, use_errno=True)  # opened here: a forked child should not load libraries


def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` that has the child sent SIGTERM when the thread that starts it ends."""
    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


class Family:
    """Every process that is started, directly or not, between ``open`` and the end of the ``with`` block.

    When the block ends, by whatever exception, none of them is left.

    Args:
        patience_s: how long the last ones are given between SIGTERM and SIGKILL at the end.
    """

    def __init__(self, patience_s: float = 3.0) -> None:
        self._patience_s = patience_s
        self._me = psutil.Process()
        self._strangers: set[psutil.Process] = set()
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Family:
        self._strangers = set(self._me.children(recursive=True))
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end(self.members)
            for process in self._started.values():
                process.poll()
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def start(self, command: list[str], environment: dict[str, str], stdout: int) -> subprocess.Popen[bytes]:
        """Start one in its own session, so that a Ctrl-C reaches it once, from us; stderr goes where stdout goes."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self._started[process.pid] = process
        return process

    def members(self) -> list[psutil.Process]:
        """All that live now; the dead ones that fell to us are buried on the way."""
        found = []
        for process in self._me.children(recursive=True):
            if process in self._strangers:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.pid not in self._started and process.ppid() == self._me.pid:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        return found

    def orphans(self, variable: str, values: Iterable[str]) -> list[psutil.Process]:
        """Members outside the trees of the started ones that still run, whose environment says they were part of one."""
        wanted = set(values)
        living: set[int] = set()
        for process in self._started.values():
            if process.poll() is None:
                living.add(process.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    living |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        found = []
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                if member.pid not in living and member.environ().get(variable) in wanted:
                    found.append(member)
        return found

    def signal(self, number: int, processes: Iterable[psutil.Process]) -> None:
        """Send a signal to each, if it is still there."""
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def end(self, select: Callable[[], list[psutil.Process]]) -> None:
        """SIGTERM, then SIGKILL, to all that ``select`` returns, again and again, until it returns none."""
        started = time.monotonic()
        told: set[psutil.Process] = set()
        while remaining := select():
            self.signal(signal.SIGTERM, set(remaining) - told)
            told.update(remaining)
            waited_s = time.monotonic() - started
            if waited_s > self._patience_s:
                self.signal(signal.SIGKILL, remaining)
            if waited_s > self._patience_s + _UNKILLABLE_AFTER_S:
                return
            time.sleep(0.02)
