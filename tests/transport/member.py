"""One leader of a ``world``, run as ``mpiexec -n k python -m tests.transport.member ACTION NAMES [FOLDER]``.

FOLDER holds certificates, NAME.pem, for TLS.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_nebula.errors import ChannelLost, NebulaError
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.throwaway import thrown_away
from paddlenlp_nebula.transport.world import join_world

from . import contract


def rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def identity(me: str, file: str | None = None) -> Identity | None:
    if len(sys.argv) <= 3:
        return None
    return Identity(replace(thrown_away(file or me, Path(sys.argv[3])), cluster=me))


def everything(me: str, names: list[str]) -> None:
    """All checks in one start of MPI."""
    for chunk_bytes, chunks in ((1024, 4), (1 << 17, 3))[: 4 - len(names)]:
        channels = join_world(me, names, 20, chunk_bytes, chunks, identity(me))
        contract.run_all(me, channels, chunks)
        contract.close_all(channels)
    wrong_names(me, names)
    farewell(me, names)


def wrong_names(me: str, names: list[str]) -> None:
    refused(lambda: join_world(names[0], names, 5), "already taken")
    refused(lambda: join_world(me, [*names, "ghost"], 5), "got a world of")
    refused(lambda: join_world(me, names, 5, chunk_bytes=1024 + rank()), "give all clusters the same value")
    if (mine := identity(me)) is not None:
        refused(lambda: join_world(me, names, 5, identity=mine if rank() else None), "set the same on all clusters")
    refused(lambda: join_world("x" * 65, names, 5), "at most 64 bytes")


def farewell(me: str, names: list[str]) -> None:
    """Closing is noticed by the others, behind what was sent before."""
    channels = join_world(me, names, 20, 1024, 4, identity(me))
    if me == names[0]:
        for channel in channels.values():
            contract.send(channel, b"last words")
            contract.wait_until(channel.flushed, channel)
            channel.close()
        return
    channel = channels[names[0]]
    contract.wait_until(lambda: channel.peek() is not None, channel)
    for _ in range(50):
        channel.progress()  # the loss waits until the chunk has been read
        time.sleep(0.002)
    assert contract.receive(channel) == b"last words"
    with pytest.raises(ChannelLost, match=names[0]):
        contract.wait_until(lambda: False, channel, deadline_s=5)
    assert channel.reserve() is None
    for each in channels.values():
        each.close()


def late(me: str, names: list[str]) -> None:
    """The last member comes too late: the others name it, in time, and everybody can leave."""
    began = time.monotonic()
    if me == names[-1]:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        time.sleep(6)
        MPI.Finalize()
        return
    refused(lambda: join_world(me, names, 2), f"waited 2 s for {names[-1]}")
    assert time.monotonic() - began < 30


def impostor(me: str, names: list[str]) -> None:
    """The last member has a certificate for another name: both sides say so, and can leave."""
    reason = f"cluster '{names[1]}' must show a certificate for '{names[1]}', got one for 'mallory'"
    file = "mallory" if me == names[1] else None
    refused(lambda: join_world(me, names, 20, identity=identity(me, file)), reason)


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(NebulaError, match=words):
        call()


if __name__ == "__main__":
    action, roster = sys.argv[1], sys.argv[2].split(",")
    {"everything": everything, "late": late, "impostor": impostor}[action](roster[rank()], roster)
    sys.stdout.write(f"{roster[rank()]} done\n")
