"""Two sealed pumps joined by a wire in memory, on which an attacker may sit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.transport.greeting import check_greeting, pack_greeting
from paddlenlp_nebula.transport.rings import cut
from paddlenlp_nebula.transport.sealed import SealedPump, wire_sends, wire_slots

Attack = Callable[[int, bytes], "list[bytes]"]


def harmless(number: int, message: bytes) -> list[bytes]:
    return [message]


class MemoryWire:
    """One end: messages reach the other end when it has a slot for them, after ``attack`` has had its way."""

    def __init__(self, slots: list[memoryview], attack: Attack = harmless) -> None:
        self.peer: MemoryWire
        self.sending = 0
        self.crossed = 0
        self.closed: Exception | None = None
        self._slots = slots
        self._attack = attack
        self._posted = deque(range(len(slots)))
        self._line: deque[tuple[int | None, bytes]] = deque()
        self._taken: list[int] = []
        self._number = 0

    def send(self, number: int, message: bytes | memoryview) -> None:
        self.sending += 1
        self.crossed += len(message)
        found = self._attack(self._number, bytes(message)) or [b""]
        self._number += 1
        for each in found[:-1]:
            self._line.append((None, each))
        self._line.append((number, found[-1]))

    def repost(self, slot: int) -> None:
        self._posted.append(slot)

    def test(self) -> tuple[list[int], list[tuple[int, int]]]:
        came = []
        while self._posted and self.peer._line:
            number, message = self.peer._line.popleft()
            if number is not None:
                self.peer.sending -= 1
                self.peer._taken.append(number)
            if message:  # an attacker has dropped it otherwise
                slot = self._posted.popleft()
                self._slots[slot][: len(message)] = message
                came.append((slot, len(message)))
        taken, self._taken = self._taken, []
        if self.closed is not None and not taken and not came:
            raise self.closed
        return taken, came


class End:
    """One side of a link: a sealed pump, its memory, and what has come."""

    def __init__(
        self,
        identity: Identity,
        peer: str,
        *,
        server_side: bool,
        chunk_bytes: int = 1000,
        chunks: int = 4,
        attack: Attack = harmless,
        ticket: bytes = bytes(16),
        greeting: bytes | None = None,
        **more: Any,
    ) -> None:
        slots = wire_slots(chunks)
        sends = wire_sends(chunks, chunk_bytes)
        self.wire = MemoryWire(slots, attack)
        self.send_slots = cut(memoryview(bytearray(chunks * chunk_bytes)), chunks, chunk_bytes)
        self.receive_slots = cut(memoryview(bytearray(chunks * chunk_bytes)), chunks, chunk_bytes)
        self.notes: list[str] = []
        self.free = deque(range(chunks))
        self.got: list[bytes] = []
        self.holds: list[int] = []
        self.reads = True
        self.pump = SealedPump(
            self.wire,
            sends,
            slots,
            new_session=lambda: identity.session(server_side=server_side, allowed=[peer], peer=f"cluster {peer!r}"),
            greeting=pack_greeting(chunk_bytes, ticket) if greeting is None else greeting,
            check=lambda theirs: check_greeting(theirs, chunk_bytes, ticket),
            receive_slots=self.receive_slots,
            note=self.notes.append,
            **more,
        )

    def send(self, data: bytes) -> bool:
        """Whether there was a chunk for it."""
        if not self.free:
            return False
        slot = self.free.popleft()
        self.send_slots[slot][: len(data)] = data
        self.pump.send(slot, self.send_slots[slot][: len(data)])
        return True

    def move(self) -> None:
        sent, came = self.pump.test()
        self.free.extend(sent)
        for slot, nbytes in came:
            self.got.append(bytes(self.receive_slots[slot][:nbytes]))
            self.holds.append(slot)
        if self.reads:
            while self.holds:
                self.pump.repost(self.holds.pop(0))


def join(west: End, east: End) -> tuple[End, End]:
    west.wire.peer, east.wire.peer = east.wire, west.wire
    return west, east


def rounds(*ends: End, most: int = 300) -> Iterator[int]:
    for number in range(most):
        for end in ends:
            end.move()
        yield number


def run(*ends: End, most: int = 300) -> None:
    for _ in rounds(*ends, most=most):
        pass
