"""Runs clusters side by side and sees each of them to its end.

A cluster that fails is reported and the others go on: whether they can is their own decision (``sync_on_loss``).
Ctrl-C or SIGTERM ends all of them, politely first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paddlenlp_nebula.launch.family import Family

__all__ = ["Cluster", "Outcome", "Supervisor", "exit_code"]

_ORPHANS_MAY_LIVE_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """What to start.

    Args:
        name: the cluster's name; ``environment`` carries it as NEBULA_CLUSTER.
        command: program and arguments.
        environment: the whole environment of the program.
        log: file for its output; without one the output goes to the supervisor's ``on_output``.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a cluster ended: ``returncode`` as in subprocess, negative for a signal."""

    name: str
    returncode: int

    @property
    def ok(self) -> bool:
        """It ended by itself, without an error."""
        return self.returncode == 0

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"cluster {self.name} ended with exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = "an unknown signal"
        return f"cluster {self.name} was ended by {name} (signal {-self.returncode})"


def exit_code(outcomes: Sequence[Outcome], interrupted_by: int | None = None) -> int:
    """The exit code of a command that ran these clusters, in the shell's convention."""
    if interrupted_by is not None:
        return 128 + interrupted_by
    first = next((outcome.returncode for outcome in outcomes if not outcome.ok), 0)
    return first if first >= 0 else 128 - first


class Supervisor:
    """Runs ``clusters`` until all have ended.

    Args:
        clusters: what to start.
        grace_s: after Ctrl-C or SIGTERM, how long they have to end by themselves before SIGTERM, and from then on
            before SIGKILL. A second Ctrl-C shortens the wait.
        on_output: takes a cluster's name and bytes it wrote; an empty piece when there will be no more.
        on_exit: called once for each cluster when it has ended.
        on_tick: called about ten times a second.

    Attributes:
        interrupted_by: the signal that ended the run early, if one did.
    """

    def __init__(
        self,
        clusters: Sequence[Cluster],
        *,
        grace_s: float = 10.0,
        on_output: Callable[[str, bytes], None] = lambda name, data: None,
        on_exit: Callable[[Outcome], None] = lambda outcome: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.interrupted_by: int | None = None
        self._clusters = clusters
        self._grace_s = grace_s
        self._on_output = on_output
        self._on_exit = on_exit
        self._on_tick = on_tick
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended_at: dict[str, float] = {}
        self._signals = 0  # received
        self._pressure = 0  # applied: 1 SIGINT, 2 SIGTERM, 3 SIGKILL
        self._pressed_at = 0.0
        self._swept_at = 0.0

    def run(self) -> list[Outcome]:
        """Start all, return when all have ended and nothing they started is left."""
        outcomes: dict[str, Outcome] = {}
        with selectors.DefaultSelector() as pipes, self._catching_signals(), Family() as family:
            for cluster in self._clusters:
                if self._signals:
                    break
                self._start(family, cluster, pipes)
            while self._running:
                self._read(pipes, wait_s=0.1)
                for name, process in list(self._running.items()):
                    if process.poll() is not None:
                        del self._running[name]
                        self._ended_at[name] = time.monotonic()
                        outcomes[name] = Outcome(name, process.returncode)
                        self._read(pipes, wait_s=0)
                        self._on_exit(outcomes[name])
                self._press(family)
                self._sweep(family)
                self._on_tick()
            # What is in a pipe now was written before its cluster's end; whoever still holds it is an orphan.
            self._read(pipes, wait_s=0)
            self._let_orphans_end(family)
            for key in list(pipes.get_map().values()):
                self._close(pipes, key)
        return [outcomes.get(c.name, Outcome(c.name, -signal.SIGINT)) for c in self._clusters]

    def _start(self, family: Family, cluster: Cluster, pipes: selectors.BaseSelector) -> None:
        command, environment = list(cluster.command), dict(cluster.environment)
        if cluster.log is None:
            process = None
            read_end, write_end = os.pipe()
            try:
                process = family.start(command, environment, write_end)
            finally:
                os.close(write_end)
                if process is None:
                    os.close(read_end)
            os.set_blocking(read_end, False)
            pipes.register(os.fdopen(read_end, "rb", buffering=0), selectors.EVENT_READ, cluster.name)
        else:
            cluster.log.parent.mkdir(parents=True, exist_ok=True)
            with open(cluster.log, "wb") as log:
                process = family.start(command, environment, log.fileno())
        self._running[cluster.name] = process

    def _read(self, pipes: selectors.BaseSelector, wait_s: float) -> None:
        if not pipes.get_map():
            time.sleep(wait_s)
            return
        started = time.monotonic()
        ready = pipes.select(wait_s)
        for key, _ in ready:
            pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
            while data := pipe.read(1 << 16):
                self._on_output(key.data, data)
            if data == b"":  # the end, where None would mean "nothing at the moment"
                self._close(pipes, key)
        if not ready:
            return
        # A chatty cluster must not turn this loop into a busy one.
        time.sleep(max(0.0, min(wait_s, 0.02) - (time.monotonic() - started)))

    def _close(self, pipes: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        pipes.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        self._on_output(key.data, b"")

    def _press(self, family: Family) -> None:
        """Ask the clusters to end, more firmly each time the grace period passes or another signal comes."""
        if not self._signals or self._pressure == 3:
            return
        due = self._pressure == 0 or time.monotonic() - self._pressed_at > self._grace_s
        if not due and self._signals <= self._pressure:
            return
        self._pressure += 1
        self._pressed_at = time.monotonic()
        if self._pressure == 1:
            # As a terminal would: to the process group of each cluster, but not to the couriers, which have
            # a session of their own and still carry the goodbye.
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
        else:
            family.signal(signal.SIGTERM if self._pressure == 2 else signal.SIGKILL, family.members())

    def _sweep(self, family: Family) -> None:
        """Bury dead orphans; end those that outlive their cluster."""
        now = time.monotonic()
        if now - self._swept_at < (0.5 if self._ended_at else 5.0):
            return
        self._swept_at = now
        overdue = [name for name, at in self._ended_at.items() if now - at > _ORPHANS_MAY_LIVE_S]
        if overdue:
            family.end(lambda: family.orphans("NEBULA_CLUSTER", overdue))
        else:
            family.members()

    def _let_orphans_end(self, family: Family) -> None:
        """Helpers notice the end of their cluster by themselves; the family's own end would interrupt them."""
        deadline = time.monotonic() + (_ORPHANS_MAY_LIVE_S if self._pressure < 2 else 0.0)
        while family.members() and time.monotonic() < deadline and self._signals < 2:
            time.sleep(0.05)

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return

        def note(number: int, _: object) -> None:
            self._signals += 1
            self.interrupted_by = self.interrupted_by or number

        heard = [signal.SIGINT, signal.SIGTERM]  # the first also where a shell has started this with an "&"
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            heard.append(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
