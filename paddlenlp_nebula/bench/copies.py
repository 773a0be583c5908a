"""The two ways of copying bytes to the other side that are compared: the link, and a plain TCP socket.

Both read from one buffer and write into another one of the same size, and both end when each side knows
that the other has everything.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from paddlenlp_nebula.bench.meters import wire_bytes
from paddlenlp_nebula.bench.plan import MESSAGE_BYTES, NAMES, Plan
from paddlenlp_nebula.link.frames import Kind, checksum
from paddlenlp_nebula.link.gather import all_gather
from paddlenlp_nebula.link.link import Link

__all__ = ["Arrivals", "Copy", "LinkCopy", "SocketCopy", "buffers", "connect", "take_samples"]

_PIECE = 1 << 20


class Arrivals:
    """When how much had come in, to tell the steady rate from that of the start."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._seen: list[tuple[float, int]] = []

    def note(self, nbytes: int) -> None:
        """So many bytes have arrived in all."""
        self._seen.append((time.perf_counter() - self.start, nbytes))

    def rate(self, omit_s: float) -> float | None:
        """Bytes per second, the first ``omit_s`` left out; None when nothing came after them."""
        if not self._seen:
            return None
        first_s, first = next((seen for seen in self._seen if seen[0] >= omit_s), self._seen[-1]) if omit_s else (0, 0)
        last_s, last = self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class Copy(ABC):
    """One way of copying.

    Args:
        source: what is sent.
        target: where what comes is written, of the same size.
    """

    def __init__(self, source: memoryview, target: memoryview) -> None:
        self.source = source
        self.target = target

    def framed_bytes(self) -> int:
        """Payload and headers sent so far; 0 where there are no headers to count."""
        return 0

    @abstractmethod
    def run(self, *, sends: bool, receives: bool) -> Arrivals:
        """Copy once; this side sends, receives or does both, the other side the counterpart."""


class LinkCopy(Copy):
    """Through a link: both directions as gradients travel, one as initial parameters do."""

    def __init__(self, link: Link, source: memoryview, target: memoryview) -> None:
        super().__init__(source, target)
        self._link = link
        self._rounds = count(1)
        self._parts = [slice(at, at + MESSAGE_BYTES) for at in range(0, len(source), MESSAGE_BYTES)]

    def framed_bytes(self) -> int:
        return self._link.bytes_sent[Kind.BUCKET.name]

    def run(self, *, sends: bool, receives: bool) -> Arrivals:
        link, number = self._link, next(self._rounds)
        arrivals, got = Arrivals(), 0
        for part, payload in self._exchange(number) if sends and receives else self._one_way(number, sends):
            self.target[self._parts[part]] = payload
            got += len(payload)
            arrivals.note(got)
        link.post(Kind.END, round=number)
        with link.receive(link.peers[0], Kind.END, round=number):
            pass
        link.flush()
        return arrivals

    def _exchange(self, number: int) -> Iterator[tuple[int, memoryview]]:
        link = self._link
        for part, member, payload in all_gather(
            link, Kind.BUCKET, number, len(self._parts), lambda part: self.source[self._parts[part]]
        ):
            if member != link.cluster:
                yield part, payload

    def _one_way(self, number: int, sends: bool) -> Iterator[tuple[int, memoryview]]:
        link = self._link
        for part, where in enumerate(self._parts):
            if sends:
                link.post(Kind.BUCKET, self.source[where], round=number, part=part)
            else:
                with link.receive(link.peers[0], Kind.BUCKET, round=number, part=part) as message:
                    yield part, message.payload
        if sends:
            link.flush()


class SocketCopy(Copy):
    """Through a plain TCP connection: ``sendall`` there, ``recv_into`` here."""

    def __init__(self, connection: socket.socket, source: memoryview, target: memoryview) -> None:
        super().__init__(source, target)
        self._connection = connection

    def run(self, *, sends: bool, receives: bool) -> Arrivals:
        arrivals = Arrivals()
        sender = threading.Thread(target=self._connection.sendall, args=(self.source,)) if sends else None
        if sender is not None:
            sender.start()
        got = 0
        while receives and got < len(self.target):
            taken = self._connection.recv_into(self.target[got : got + _PIECE])
            if taken == 0:
                raise EOFError("the other side closed the plain socket")
            got += taken
            arrivals.note(got)
        if sender is not None:
            sender.join()
        self._connection.sendall(b".")
        self._connection.recv(1)
        return arrivals

    def rtt_s(self, *, asks: bool, times: int = 5) -> float:
        """The shortest of a few round trips of one byte, on the side that asks; the other side answers."""
        shortest = float("inf")
        for _ in range(times):
            start = time.perf_counter()
            if asks:
                self._connection.sendall(b"?")
                self._connection.recv(1)
                shortest = min(shortest, time.perf_counter() - start)
            else:
                self._connection.sendall(self._connection.recv(1))
        return shortest


def connect(where: str, *, listens: bool, timeout_s: float) -> socket.socket:
    """A TCP connection between the two sides: one listens at ``where``, the other one comes there."""
    host, _, port = where.rpartition(":")
    if listens:
        with socket.create_server((host, int(port))) as server:
            server.settimeout(timeout_s)
            connection, _ = server.accept()
    else:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=timeout_s)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def buffers(name: str, messages: int) -> tuple[memoryview, memoryview]:
    """What a side sends, and where it writes what comes; no byte of the first is zero at a message's start.

    Touched before anything is measured: a page that the kernel has yet to clear costs more than its copy.
    """
    pattern = b"\1" + random.Random(name).randbytes(MESSAGE_BYTES - 1)
    source = memoryview(bytearray(pattern * messages))
    return source, memoryview(bytearray(b"\1" * len(source)))


def take_samples(
    name: str,
    plan: Plan,
    copies: Mapping[str, Copy],
    *,
    ready: Callable[[], object],
    cpu_seconds: Callable[[], dict[str, float]],
) -> list[dict[str, Any]]:
    """Copy one way and both ways in turn, as often as planned, and note what each copy took on this side.

    Args:
        name: this side.
        plan: what to copy how often.
        copies: the ways of copying by their names, the same on both sides.
        ready: returns when both sides have called it.
        cpu_seconds: seconds of computing so far, by role.
    """
    first = name == NAMES[0]
    samples: list[dict[str, Any]] = []
    for repetition in range(plan.repetitions):
        for directions in (1, 2):
            for way, copy in copies.items():
                copy.target[::MESSAGE_BYTES] = bytes(plan.messages)  # what is not written now shows in the digest
                ready()
                used, wire, framed = cpu_seconds(), wire_bytes()[0], copy.framed_bytes()
                receives = directions == 2 or not first
                arrivals = copy.run(sends=directions == 2 or first, receives=receives)
                seconds = time.perf_counter() - arrivals.start
                samples.append(
                    {
                        "way": way,
                        "directions": directions,
                        "repetition": repetition,
                        "seconds": seconds,
                        "steady_bytes_s": arrivals.rate(plan.omit_s),
                        "cpu_s": {role: total - used[role] for role, total in cpu_seconds().items()},
                        "device_bytes_sent": wire_bytes()[0] - wire,
                        "framed_bytes_sent": copy.framed_bytes() - framed,
                        "digest": checksum(copy.target) if receives else None,
                    }
                )
    return samples
