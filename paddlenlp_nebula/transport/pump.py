"""Messages over one MPI communicator: receives posted ahead, sends in flight, nothing that waits.

The only module besides the couriers' main program and ``world`` that touches MPI, and only with
upper-case (buffer) calls. Import it after ``mpi4py.rc.initialize = False``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from mpi4py import MPI

from ..security.session import Session
from .sealed import SealedPump, wire_sends, wire_slots

__all__ = ["CHUNK_TAG", "PeerClosed", "Pump", "seal"]

CHUNK_TAG = 0x4E42


class PeerClosed(Exception):
    """The other side has sent its last chunk."""


class Pump:
    """Moves messages between this process and ``rank`` of ``comm``.

    Sends are synchronous-mode (``Issend``): complete only when the peer has taken the chunk into a posted
    slot. With standard mode a peer that reads nothing would make small messages pile up inside its MPI,
    without bound; this way the slots are the only buffers, and a completed send really is delivered.

    Args:
        comm: an intracommunicator or an intercommunicator, with errors returned.
        rank: the peer's rank in it.
        sends: how many messages can be on their way out at once; they are numbered from 0.
        receive_slots: writable views that messages are received into; all of them are posted at once.

    Attributes:
        sending: how many messages are on their way out.
        ready: whether chunks can flow (a `SealedPump` must first know who is there).
    """

    ready: ClassVar[bool] = True

    def __init__(self, comm: MPI.Comm, rank: int, sends: int, receive_slots: Sequence[memoryview]) -> None:
        self._comm = comm
        self._rank = rank
        self._receive_slots = receive_slots
        self._base = sends
        slots = self._base + len(receive_slots)
        self._requests: list[MPI.Request] = [MPI.REQUEST_NULL] * slots
        self._statuses = [MPI.Status() for _ in range(slots)]
        self._posted: deque[int] = deque()  # in the order in which MPI fills them
        self._filled: dict[int, int] = {}
        self.sending = 0
        for slot in range(len(receive_slots)):
            self.repost(slot)

    def send(self, number: int, message: bytes | memoryview) -> None:
        """Start sending a message, not an empty one; ``test`` returns its number when it has been taken."""
        self._requests[number] = self._comm.Issend([message, len(message), MPI.BYTE], self._rank, CHUNK_TAG)
        self.sending += 1

    def repost(self, slot: int) -> None:
        """Let the next message come into a receive slot."""
        buffer = self._receive_slots[slot]
        self._requests[self._base + slot] = self._comm.Irecv([buffer, len(buffer), MPI.BYTE], self._rank, CHUNK_TAG)
        self._posted.append(slot)

    def test(self) -> tuple[list[int], list[tuple[int, int]]]:
        """What has completed since the last call.

        Returns:
            The numbers of messages that the peer has taken, and (receive slot, bytes) in the order they were sent.

        Raises:
            MPI.Exception: MPI reports an error.
            PeerClosed: the peer has said that nothing more will come; what came before has been returned.
        """
        sent: list[int] = []
        for position, index in enumerate(MPI.Request.Testsome(self._requests, self._statuses) or ()):
            if index < self._base:
                sent.append(index)
            else:
                self._filled[index - self._base] = self._statuses[position].Get_count(MPI.BYTE)
        self.sending -= len(sent)
        received: list[tuple[int, int]] = []
        while self._posted and self._posted[0] in self._filled:
            slot = self._posted[0]
            nbytes = self._filled[slot]
            if nbytes == 0:
                if received or sent:
                    break
                raise PeerClosed
            self._posted.popleft()
            del self._filled[slot]
            received.append((slot, nbytes))
        return sent, received

    def close(self) -> list[MPI.Request]:
        """Tell the peer that nothing more will come: an empty message, behind all chunks.

        Returns:
            What MPI may not have finished with; keep it until it has, for its memory belongs to MPI so long.
        """
        for request in self._requests[self._base :]:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
        bye = self._comm.Isend([bytearray(0), 0, MPI.BYTE], self._rank, CHUNK_TAG)
        return [request for request in (*self._requests, bye) if request != MPI.REQUEST_NULL]


def seal(
    comm: MPI.Comm,
    rank: int,
    receive_slots: Sequence[memoryview],
    *,
    new_session: Callable[[], Session],
    greeting: bytes,
    check: Callable[[bytes], None],
    note: Callable[[str], None],
) -> tuple[SealedPump, Pump]:
    """A pump under TLS, and the one below it that the sealed messages go through; for the arguments see `SealedPump`."""
    chunks = len(receive_slots)
    sends, slots = wire_sends(chunks, len(receive_slots[0])), wire_slots(chunks)
    wire = Pump(comm, rank, sends, slots)
    pump = SealedPump(
        wire,
        sends,
        slots,
        new_session=new_session,
        greeting=greeting,
        check=check,
        receive_slots=receive_slots,
        note=note,
    )
    return pump, wire
