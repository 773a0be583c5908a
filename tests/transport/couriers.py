"""Couriers for tests: a joined pair, a mesh between threads, and a leader process that can be killed."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from paddlenlp_nebula.security.identity import Credentials
from paddlenlp_nebula.transport.courier import CourierChannel

from . import contract


@contextmanager
def pair(
    a: str = "west",
    b: str = "east",
    chunk_bytes: int = 1024,
    chunks: int = 4,
    mpiexec: list[str] | None = None,
    credentials: Mapping[str, Credentials] | None = None,
) -> Iterator[tuple[CourierChannel, CourierChannel]]:
    """The channel of ``a`` (its peer is ``b``) and that of ``b``, joined."""
    known = credentials or {}
    at_a = CourierChannel(b, chunk_bytes, chunks, mpiexec=mpiexec, credentials=known.get(a))
    at_b = CourierChannel(a, chunk_bytes, chunks, mpiexec=mpiexec, credentials=known.get(b))
    try:
        join(at_a, at_b)
        yield at_a, at_b
    finally:
        at_a.close()
        at_b.close()


def join(at_a: CourierChannel, at_b: CourierChannel) -> None:
    at_a.open_port()
    contract.wait_until(lambda: at_a.port is not None, at_a, at_b)
    assert at_a.port is not None
    at_a.accept(20)
    at_b.connect(at_a.port, 20)
    contract.wait_until(lambda: at_a.connected and at_b.connected, at_a, at_b)


def mesh(
    names: Sequence[str],
    chunk_bytes: int,
    chunks: int,
    mpiexec: list[str] | None,
    credentials: Mapping[str, Credentials] | None = None,
) -> dict[str, dict[str, CourierChannel]]:
    channels: dict[str, dict[str, CourierChannel]] = {name: {} for name in names}
    for a, b in itertools.combinations(names, 2):
        for one, other in ((a, b), (b, a)):
            own = None if credentials is None else credentials[one]
            channels[one][other] = CourierChannel(other, chunk_bytes, chunks, mpiexec=mpiexec, credentials=own)
        join(channels[a][b], channels[b][a])
    return channels


def processes_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def courier_below(channel: CourierChannel) -> psutil.Process:
    """The process in which the channel's MPI lives."""
    family = psutil.Process(channel.launcher).children(recursive=True)
    return next(process for process in family if "python" in process.name())


def gone(processes: Sequence[psutil.Process], within_s: float) -> bool:
    """Whether all of them end (or are zombies that only an init can reap)."""
    deadline = time.monotonic() + within_s
    while any(alive(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def leader(inside_mpi: bool) -> None:
    """A leader with couriers (joined, or stuck in MPI's accept) and a forked data worker; says so, and sleeps."""
    if inside_mpi:
        waiting = CourierChannel("nobody", 1024, 4)
        waiting.open_port()
        contract.wait_until(lambda: waiting.port is not None, waiting)
        waiting.accept(60)
        _fork_and_sleep()
    with pair():
        _fork_and_sleep()


def _fork_and_sleep() -> None:
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    sys.stdout.write(f"{worker}\n")
    sys.stdout.flush()
    time.sleep(60)


if __name__ == "__main__":
    leader("inside_mpi" in sys.argv)
