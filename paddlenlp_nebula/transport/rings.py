"""The bookkeeping that the MPI transports share: which chunk is free, in flight, received or peeked."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from ..errors import ChannelLost
from .channel import Channel

__all__ = ["RingChannel", "cut"]


def cut(memory: memoryview, chunks: int, chunk_bytes: int) -> list[memoryview]:
    """``chunks`` writable slots of ``chunk_bytes`` bytes each, side by side in ``memory``."""
    return [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(chunks)]


class RingChannel(Channel):
    """A channel over fixed slots. Subclasses move the bytes and report with ``_sent``, ``_arrived``, ``_lose``.

    Args:
        peer: name of the cluster at the other end.
        send_slots: writable memory, one view per chunk of the way out.
        receive_slots: the same for the way in.
    """

    def __init__(self, peer: str, send_slots: Sequence[memoryview], receive_slots: Sequence[memoryview]) -> None:
        super().__init__(peer, len(send_slots[0]))
        self._send_slots = list(send_slots)
        self._receive_slots = list(receive_slots)
        self._free = deque(range(len(send_slots)))
        self._in_flight: dict[int, int] = {}  # slot -> bytes
        self._received: deque[tuple[int, int]] = deque()
        self._reserved: int | None = None
        self._peeked = False
        self._loss: str | None = None
        self._closed = False

    @abstractmethod
    def _submit(self, slot: int, nbytes: int) -> None:
        """Start sending ``nbytes`` of a send slot."""

    @abstractmethod
    def _repost(self, slot: int) -> None:
        """Let the next chunk come into a receive slot."""

    @abstractmethod
    def _move(self) -> None:
        """Move what can be moved, without waiting."""

    def _sent(self, slot: int) -> None:
        self.bytes_delivered += self._in_flight.pop(slot)
        self._free.append(slot)

    def _arrived(self, slot: int, nbytes: int) -> None:
        self._received.append((slot, nbytes))

    def _lose(self, reason: str) -> None:
        """Remember the first reason; ``progress`` raises it once everything received has been read."""
        if self._loss is None:
            self._loss = reason

    @property
    def loss(self) -> str | None:
        """Why nothing more will be sent or come, if that is known."""
        return self._loss

    def free_chunks(self) -> int:
        if self._closed or self._loss is not None:
            return 0
        return len(self._free) + (self._reserved is not None)

    def reserve(self) -> memoryview | None:
        if self._closed or self._loss is not None:
            return None
        if self._reserved is None:
            if not self._free:
                return None
            self._reserved = self._free.popleft()
        return self._send_slots[self._reserved]

    def commit(self, nbytes: int) -> None:
        if self._reserved is None:
            raise ValueError("commit() needs a chunk from reserve() first")
        if not 1 <= nbytes <= self.chunk_bytes:
            raise ValueError(f"commit() takes 1..{self.chunk_bytes} bytes, got {nbytes}")
        slot, self._reserved = self._reserved, None
        self._in_flight[slot] = nbytes
        self.bytes_sent += nbytes
        if not self._closed and self._loss is None:
            self._submit(slot, nbytes)

    def peek(self) -> memoryview | None:
        if self._closed or not self._received:
            return None
        slot, nbytes = self._received[0]
        self._peeked = True
        return self._receive_slots[slot][:nbytes].toreadonly()

    def release(self) -> None:
        if self._closed or not self._peeked:
            raise ValueError("release() needs a chunk from peek() first")
        slot, nbytes = self._received.popleft()
        self._peeked = False
        self.bytes_received += nbytes
        if self._loss is None:
            self._repost(slot)

    def progress(self) -> None:
        if self._closed:
            raise ChannelLost(self.peer, "this side has closed it")
        if self._loss is None:
            self._move()
        if self._loss is not None and not self._received:
            raise ChannelLost(self.peer, self._loss)

    def flushed(self) -> bool:
        return not self._in_flight
