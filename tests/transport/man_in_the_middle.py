"""An attacker between two couriers: ``mpiexec -n 1 python -m tests.transport.man_in_the_middle ATTACK AFTER``.

It reads west's MPI port from its input, writes a port of its own for east, and relays every message of either side,
except that from the AFTER-th one on it does ATTACK to what west sends. It knows the couriers' ticket; all that it lacks
is a certificate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

Change = Callable[[bytes], "list[bytes]"]


def flip(message: bytes) -> list[bytes]:
    return [message[:-1] + bytes([message[-1] ^ 0x10])]


def truncate(message: bytes) -> list[bytes]:
    return [message[:-3]]


class Drop:
    """One message is missing; if all were, it would be silence, which a link bears for ``sync_timeout_s``."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, message: bytes) -> list[bytes]:
        dropped, self._done = not self._done, True
        return [] if dropped else [message]


def replay(message: bytes) -> list[bytes]:
    return [message, message]


def insert(message: bytes) -> list[bytes]:
    return [b"\x17\x03\x03\x01\x00" + os.urandom(256), message]


def nothing(message: bytes) -> list[bytes]:
    return [message]


class Reorder:
    """Every second message goes before the one in front of it."""

    def __init__(self) -> None:
        self._kept: bytes | None = None

    def __call__(self, message: bytes) -> list[bytes]:
        if self._kept is None:
            self._kept = message
            return []
        swapped, self._kept = [message, self._kept], None
        return swapped


ATTACKS: dict[str, Change] = {
    "nothing": nothing,
    "flip": flip,
    "truncate": truncate,
    "drop": Drop(),
    "replay": replay,
    "insert": insert,
    "reorder": Reorder(),
}


def relay(source: MPI.Intercomm, target: MPI.Intercomm, change: Change) -> bool:
    """Pass on a message if there is one."""
    status = MPI.Status()
    if not source.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        return False
    message = bytearray(status.Get_count(MPI.BYTE))
    source.Recv([message, len(message), MPI.BYTE], 0, status.Get_tag())
    for each in change(bytes(message)):
        target.Send([each, len(each), MPI.BYTE], 0, status.Get_tag())
    return True


def main() -> None:
    attack, after = ATTACKS[sys.argv[1]], int(sys.argv[2])
    MPI.Init()
    port = MPI.Open_port()
    print(port, flush=True)
    west = MPI.COMM_SELF.Connect(sys.stdin.readline().strip())
    east = MPI.COMM_SELF.Accept(port)
    seen = 0

    def tamper(message: bytes) -> list[bytes]:
        nonlocal seen
        seen += 1
        return attack(message) if seen > after else [message]

    while True:
        if not (relay(west, east, tamper) | relay(east, west, nothing)):
            time.sleep(0.001)


if __name__ == "__main__":
    main()
