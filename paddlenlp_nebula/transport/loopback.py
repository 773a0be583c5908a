"""Channels between members that are threads of one process, for tests, notebooks and simulation."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..errors import ChannelLost, NebulaError
from .channel import CHUNK_BYTES, CHUNKS, Channel

__all__ = ["LoopbackChannel", "LoopbackHub", "join_loopback", "loopback_pair"]


class _Bell:
    """An eventfd that one side rings and the other selects on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class _Lane:
    """One direction of a pair: a bounded queue of chunks. deque's append and popleft are atomic."""

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.unborn = chunks  # allocated at first use, by the sender
        self.free: deque[bytearray] = deque()
        self.ready: deque[tuple[bytearray, int]] = deque()
        self.writer_closed = False
        self.reader_closed = False

    def take(self) -> bytearray | None:
        if self.free:
            return self.free.popleft()
        if self.unborn:
            self.unborn -= 1
            return bytearray(self.chunk_bytes)
        return None


class LoopbackChannel(Channel):
    """One end of :func:`loopback_pair`."""

    def __init__(self, peer: str, outward: _Lane, inward: _Lane, own_bell: _Bell, peer_bell: _Bell) -> None:
        super().__init__(peer, outward.chunk_bytes)
        self._out = outward
        self._in = inward
        self._own_bell = own_bell
        self._peer_bell = peer_bell
        self._reserved: bytearray | None = None
        self._peeked = False
        self._closed = False

    def free_chunks(self) -> int:
        if self._closed or self._out.reader_closed:
            return 0
        return len(self._out.free) + self._out.unborn + (self._reserved is not None)

    def reserve(self) -> memoryview | None:
        if self._closed or self._out.reader_closed:
            return None
        if self._reserved is None:
            self._reserved = self._out.take()
        return None if self._reserved is None else memoryview(self._reserved)

    def commit(self, nbytes: int) -> None:
        if self._reserved is None:
            raise ValueError("commit() needs a chunk from reserve() first")
        if not 1 <= nbytes <= self.chunk_bytes:
            raise ValueError(f"commit() takes 1..{self.chunk_bytes} bytes, got {nbytes}")
        chunk, self._reserved = self._reserved, None
        self.bytes_sent += nbytes
        self._out.ready.append((chunk, nbytes))
        self._peer_bell.ring()

    def peek(self) -> memoryview | None:
        if self._closed or not self._in.ready:
            return None
        chunk, nbytes = self._in.ready[0]
        self._peeked = True
        return memoryview(chunk)[:nbytes].toreadonly()

    def release(self) -> None:
        if self._closed or not self._peeked:
            raise ValueError("release() needs a chunk from peek() first")
        self._peeked = False
        chunk, nbytes = self._in.ready.popleft()
        self.bytes_received += nbytes
        self._in.free.append(chunk)
        self._peer_bell.ring()

    def progress(self) -> None:
        if self._closed:
            raise ChannelLost(self.peer, "this side has closed it")
        self._own_bell.hush()
        # Read the flag before the queue: the peer appends before it closes.
        if self._in.writer_closed and not self._in.ready:
            raise ChannelLost(self.peer, "the other side has closed it")

    @property
    def loss(self) -> str | None:
        return "the other side has closed it" if self._out.reader_closed else None

    def flushed(self) -> bool:
        return True  # a committed chunk is in the peer's queue at once, and stays there after close()

    def fileno(self) -> int | None:
        return None if self._closed else self._own_bell.fd

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._out.writer_closed = True
        self._in.reader_closed = True
        self._peer_bell.ring()
        self._own_bell.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def loopback_pair(
    peer_a: str, peer_b: str, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS
) -> tuple[LoopbackChannel, LoopbackChannel]:
    """Two joined channels: the first belongs to ``peer_a`` (its peer is ``peer_b``), the second to ``peer_b``.

    Args:
        peer_a: name of the member that drives the first channel.
        peer_b: name of the member that drives the second channel.
        chunk_bytes: capacity of one chunk.
        chunks: chunks in flight per direction, allocated as they are first used.
    """
    if chunk_bytes < 1 or chunks < 1:
        raise ValueError(f"chunk_bytes and chunks must be at least 1, got {chunk_bytes} and {chunks}")
    a_to_b, b_to_a = _Lane(chunk_bytes, chunks), _Lane(chunk_bytes, chunks)
    bell_a, bell_b = _Bell(), _Bell()
    return (
        LoopbackChannel(peer_b, a_to_b, b_to_a, bell_a, bell_b),
        LoopbackChannel(peer_a, b_to_a, a_to_b, bell_b, bell_a),
    )


class _Meeting:
    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self.shape = (chunk_bytes, chunks)
        self.present: set[str] = set()
        self.channels: dict[str, dict[str, Channel]] | None = None


class LoopbackHub:
    """A place where the members of a roster meet; free for the next run as soon as all have come."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, ...], _Meeting] = {}
        self._changed = threading.Condition()

    def join(
        self,
        cluster: str,
        clusters: Sequence[str],
        timeout_s: float,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
    ) -> dict[str, Channel]:
        """See :func:`join_loopback`."""
        roster = tuple(clusters)
        if cluster not in roster or len(set(roster)) != len(roster):
            raise NebulaError(f"expected different cluster names with {cluster!r} among them, got {', '.join(roster)}")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            meeting = self._meetings.setdefault(roster, _Meeting(chunk_bytes, chunks))
            if cluster in meeting.present:
                raise NebulaError(
                    f"cluster {cluster!r} is already waiting for {', '.join(roster)} in this process; "
                    "start every cluster once, or give runs at the same time other names"
                )
            if meeting.shape != (chunk_bytes, chunks):
                raise NebulaError(
                    f"cluster {cluster!r} wants {chunks} chunks of {chunk_bytes} bytes but the others "
                    f"{meeting.shape[1]} of {meeting.shape[0]}; give all the same values"
                )
            meeting.present.add(cluster)
            if len(meeting.present) == len(roster):
                meeting.channels = _mesh(roster, chunk_bytes, chunks)
                del self._meetings[roster]
                self._changed.notify_all()
            while meeting.channels is None:
                if not self._changed.wait(deadline - time.monotonic()) and meeting.channels is None:
                    missing = ", ".join(name for name in roster if name not in meeting.present)
                    meeting.present.discard(cluster)
                    if not meeting.present:
                        del self._meetings[roster]
                    raise NebulaError(
                        f"cluster {cluster!r} waited {timeout_s:g} s in this process for {missing}; "
                        "start a thread for every cluster of the roster"
                    )
            return meeting.channels.pop(cluster)


def _mesh(roster: tuple[str, ...], chunk_bytes: int, chunks: int) -> dict[str, dict[str, Channel]]:
    channels: dict[str, dict[str, Channel]] = {name: {} for name in roster}
    for a, b in itertools.combinations(roster, 2):
        channels[a][b], channels[b][a] = loopback_pair(a, b, chunk_bytes, chunks)
    return channels


# Threads that know only their names must find each other somewhere; it holds nothing between runs.
_HUB = LoopbackHub()


def join_loopback(
    cluster: str,
    clusters: Sequence[str],
    timeout_s: float,
    chunk_bytes: int = CHUNK_BYTES,
    chunks: int = CHUNKS,
) -> dict[str, Channel]:
    """Meet the other members, threads of this process that call this with the same roster.

    Args:
        cluster: this member's name.
        clusters: all names, in the same order at every member.
        timeout_s: seconds to wait for the others.
        chunk_bytes: capacity of one chunk.
        chunks: chunks in flight per direction.

    Returns:
        One channel per other member, by its name.

    Raises:
        NebulaError: a member did not come in time, or the arguments do not fit together.
    """
    return _HUB.join(cluster, clusters, timeout_s, chunk_bytes, chunks)
