"""The contract of every transport: a channel moves chunks between two leaders and never blocks.

A chunk is a piece of memory that the channel owns (shared memory for the courier, MPI buffers for
``world``), so that the link writes what it sends and reads what it got without another copy:

    view = channel.reserve()          # None while every chunk is in flight
    view[:n] = ...; channel.commit(n)

    view = channel.peek()             # None while nothing has arrived
    ...; channel.release()

What is *in* the chunks is the link's business (``link/frames.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

__all__ = ["CHUNKS", "CHUNK_BYTES", "Channel"]

CHUNK_BYTES = 1 << 20
"""Default capacity of one chunk. Our choice: large enough for MPI's bandwidth, small enough to pipeline."""

CHUNKS = 16
"""Default chunks in flight per direction: 16 MiB covers 1 Gbit/s at 130 ms."""


class Channel(ABC):
    """A duplex, ordered, reliable stream of chunks between this leader and one peer.

    Every method returns at once. Chunks arrive whole, in the order of their ``commit``, with the
    length they were committed with. Not thread-safe: one thread drives a channel.

    Attributes:
        peer: name of the cluster at the other end.
        chunk_bytes: capacity of one chunk, the same at both ends.
        bytes_sent: bytes committed so far.
        bytes_received: bytes of all chunks that have arrived and been released so far.
        bytes_delivered: bytes of the committed chunks that the peer is known to have.
        seconds_sending: time in which any of those was on its way; 0 where nobody has looked at a clock.
        notes: sentences for the log that have come up; whoever logs takes them out.
        autonomous: whether committed chunks travel on while this process does something else.
    """

    autonomous: ClassVar[bool] = True

    def __init__(self, peer: str, chunk_bytes: int) -> None:
        self.peer = peer
        self.chunk_bytes = chunk_bytes
        self.bytes_sent = 0
        self.bytes_received = 0
        self.bytes_delivered = 0
        self.seconds_sending = 0.0
        self.notes: deque[str] = deque(maxlen=64)

    @abstractmethod
    def free_chunks(self) -> int:
        """How many times ``reserve``/``commit`` would succeed right now."""

    @abstractmethod
    def reserve(self) -> memoryview | None:
        """A writable view of ``chunk_bytes`` bytes to fill, or None while all chunks are in flight.

        Calling it again before ``commit`` returns the same chunk.
        """

    @abstractmethod
    def commit(self, nbytes: int) -> None:
        """Send the first ``nbytes`` (1..chunk_bytes) of the reserved chunk."""

    @abstractmethod
    def peek(self) -> memoryview | None:
        """A read-only view of the oldest received chunk, or None. Valid until ``release``."""

    @abstractmethod
    def release(self) -> None:
        """Give the peeked chunk back for reuse."""

    @abstractmethod
    def progress(self) -> None:
        """Move what can be moved.

        Raises:
            ChannelLost: nothing more will ever be sent, and everything that had arrived before the
                loss has been peeked and released.
        """

    @property
    @abstractmethod
    def loss(self) -> str | None:
        """Why nothing more can be sent, as soon as that is known: before ``progress`` says so, if something is unread."""

    @abstractmethod
    def flushed(self) -> bool:
        """Whether every committed chunk has been handed over to the network (or the peer)."""

    @abstractmethod
    def fileno(self) -> int | None:
        """A descriptor that becomes readable when ``progress`` has something to do, or None (poll)."""

    @abstractmethod
    def close(self) -> None:
        """Free everything at once; whatever is in flight may be lost. Idempotent, never raises."""
