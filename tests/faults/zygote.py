"""Starts trainers quickly: ``zygote.py MODULE`` imports once what takes many seconds to import, then forks one per order.

Orders are JSON lines on standard input: {"argv", "env", "folder", "site"}; answers {"started"} and
{"ended", "code"} on standard output. A forked trainer moves to its site (``Site.place`` of ``wan.py``, or null),
and calls ``main(argv)`` of MODULE by this module's end, so that exceptions, exit handlers and signals take the way
that they take in a script. It ends with this process, and this process with its standard input.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.wan import enter


def wait_for_orders() -> list[str]:
    """Serve; returns, in a forked child, the arguments of the trainer it is to be."""
    watched = selectors.DefaultSelector()
    watched.register(0, selectors.EVENT_READ)
    pending = b""
    gc.freeze()  # or each child's collector, at exit above all, would copy every page that holds an object
    say(ready=os.getpid())
    while True:
        for key, _ in watched.select():
            if key.fd != 0:
                watched.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                say(ended=key.data, code=os.waitstatus_to_exitcode(status))
                continue
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    watched.close()
                    become_trainer(order)
                    return list(order["argv"])
                watched.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                say(started=pid)


def become_trainer(order: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setsid()  # by which its data workers are found
    if order["site"] is not None:
        enter(**order["site"])
    folder = Path(order["folder"])
    os.environ.update(order["env"])
    os.chdir(folder)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(new, old)


def say(**answer: int) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    trainee = importlib.import_module(sys.argv[1])
    sys.argv[1:] = wait_for_orders()
    trainee.main(sys.argv[1:])
