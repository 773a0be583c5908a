"""Chunks under TLS: a pump that seals them on the way to another pump, and opens what comes from it.

What crosses the network is one TLS session after the other. The plaintext of each, both ways alike:

    answer u8 (1: welcome, then a greeting; 2: refused, then why), its length u32
    for every chunk: its length u32, its bytes
    length 0: nothing more in this session, the next one follows

The boundaries of the wire's messages mean nothing, so nothing is gained by moving them. Sessions are renewed long before
AES-GCM's keys wear out, and often enough that a new certificate is soon in use: each side says that it has finished, and
both begin the next handshake when nothing is on its way any more.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from ..errors import NebulaError, ProtocolError, SecurityError
from ..security.session import RECORD_BYTES, Session

__all__ = ["SealedPump", "Wire", "wire_sends", "wire_slots"]

_PIECE_BYTES = 1 << 20  # sealed into one message; smaller ones keep MPI busier, larger ones keep it waiting
_WIRE_BYTES = _PIECE_BYTES + 32 * (_PIECE_BYTES // RECORD_BYTES) + 1024
_WIRE_SLOTS = 4  # of what has been received and not opened yet; TCP's window holds what follows

# AES-GCM is safe for 2^24.5 full records under one key (RFC 8446, section 5.5). 2^22 of them are 64 GiB.
_RENEW_RECORDS = 1 << 22
_RENEW_S = 6 * 3600.0

_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct("<BI")
_WELCOME, _REFUSED = 1, 2
_ANSWER_BYTES = 1024
_LAST_WORDS_S = 1.0  # for the other side to hear why


class Wire(Protocol):
    """What carries sealed messages: `pump.Pump`, or a test's."""

    sending: int

    def send(self, number: int, message: bytes | memoryview) -> None:
        """Start sending message ``number``."""

    def repost(self, slot: int) -> None:
        """Let the next message come into a slot."""

    def test(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Numbers of messages that have been taken, and (slot, bytes) of those that have come."""


def wire_sends(chunks: int, chunk_bytes: int) -> int:
    """How many messages the wire should be able to send at once: all chunks of the way out."""
    return chunks * -(-chunk_bytes // _PIECE_BYTES)


def wire_slots(chunks: int) -> list[memoryview]:
    """Memory for the messages that come from the wire."""
    return [memoryview(bytearray(_WIRE_BYTES)) for _ in range(min(_WIRE_SLOTS, chunks))]


class SealedPump:
    """Takes the place of `pump.Pump` for chunks.

    Args:
        wire: what sealed messages go through.
        sends: how many messages it can send at once.
        slots: the slots that it receives into.
        new_session: makes the next session; both sides come to it in step.
        greeting: what the other side is to hear first, in every session.
        check: given the other side's greeting, raises ProtocolError if the two do not fit together.
        receive_slots: writable memory for opened chunks, one view each, of the largest chunk's length.
        note: told, in a sentence, what should be in the log.
        renew_records, renew_s: a session is renewed after so many records of this side, or seconds.

    Attributes:
        sessions: how many there have been, from 1.
    """

    def __init__(
        self,
        wire: Wire,
        sends: int,
        slots: Sequence[memoryview],
        *,
        new_session: Callable[[], Session],
        greeting: bytes,
        check: Callable[[bytes], None],
        receive_slots: Sequence[memoryview],
        note: Callable[[str], None] = lambda sentence: None,
        renew_records: int = _RENEW_RECORDS,
        renew_s: float = _RENEW_S,
    ) -> None:
        self.sessions = 0
        self._wire = wire
        self._slots = slots
        self._new_session = new_session
        self._greeting = greeting
        self._check = check
        self._receive_slots = receive_slots
        self._note = note
        self._renew_records = renew_records
        self._renew_s = renew_s
        # The way out
        self._numbers = deque(range(sends))  # of messages that are not on their way
        self._waiting: deque[tuple[int, memoryview]] = deque()  # chunks to be sealed, and what is left of the first one
        self._begun = False  # the first one's length has been written
        self._chunk_of: dict[int, int | None] = {}  # message on its way -> the chunk that it is a part of
        self._unsent: dict[int, int] = {}  # chunk -> its messages on their way, and one more until it is sealed
        self._sent: list[int] = []
        # The way in
        self._inbox: deque[tuple[int, int]] = deque()
        self._feeding: int | None = None  # the wire's slot that the session is reading
        self._vacant = deque(range(len(receive_slots)))
        self._opened: list[tuple[int, int]] = []
        self._ended: Exception | None = None
        self._begin()

    @property
    def ready(self) -> bool:
        """Whether each side has let the other in."""
        return self._welcome or self.sessions > 1

    @property
    def sending(self) -> int:
        """How many chunks are on their way out."""
        return len(self._unsent)

    def send(self, number: int, message: memoryview) -> None:
        """Take a chunk, not an empty one, to be sent by ``test``, which returns its number when the peer's side has it."""
        self._unsent[number] = 1
        self._waiting.append((number, message))

    def repost(self, slot: int) -> None:
        """Let the next chunk come into a slot that ``test`` has returned."""
        self._vacant.append(slot)

    def test(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Move what can be moved.

        Returns:
            The numbers of chunks that the peer's side has, and (receive slot, bytes) in the order they were sent.

        Raises:
            SecurityError: one side has refused the other, or data was altered on the way.
            ProtocolError: the other side was let in and breaks the rules.
            Exception: what the wire raises, after all that had come before.
        """
        self._carry()
        try:
            self._open()
            self._seal()
        except NebulaError as error:
            self._say_why(error)
            raise
        sent, self._sent = self._sent, []
        opened, self._opened = self._opened, []
        stalled = self._target is None and not self._peer_finished
        if self._ended is not None and not sent and not opened and not stalled:
            raise self._ended
        return sent, opened

    def _carry(self) -> None:
        """Let the wire work: also while much is sealed or opened, for MPI moves nothing by itself."""
        if self._ended is not None:
            return
        try:
            numbers, came = self._wire.test()
        except Exception as error:  # first comes what had arrived before
            self._ended = error
            return
        self._inbox.extend(came)
        self._numbers.extend(numbers)
        chunks = [self._chunk_of.pop(number) for number in numbers]
        self._sent += [chunk for chunk in chunks if chunk is not None and self._is_last_of(chunk)]

    def _is_last_of(self, chunk: int) -> bool:
        self._unsent[chunk] -= 1
        return self._unsent[chunk] == 0 and self._unsent.pop(chunk) == 0

    # Sessions

    def _begin(self) -> None:
        self.sessions += 1
        self._since = time.monotonic()
        self._session = self._new_session()
        self._greeted = self._welcome = self._finished = self._peer_finished = False
        self._parser = self._parse()
        self._target = next(self._parser)

    def _shake(self) -> bool:
        """Go on with the handshake; whether plaintext can be read."""
        if not self._greeted and self._session.handshake():
            self._greeted = True
            self._session.write(_ANSWER.pack(_WELCOME, len(self._greeting)) + self._greeting)
            if sentence := self._session.expiry_note:
                self._note(sentence)
        return self._greeted

    def _say_why(self, error: NebulaError) -> None:
        """Let the other side know, as far as it listens: in our words, or with the alert that OpenSSL has ready."""
        with suppress(Exception):
            if not self._greeted:
                reason = str(error).encode()[:_ANSWER_BYTES]
                self._session.write(_ANSWER.pack(_REFUSED, len(reason)) + reason)
        with suppress(Exception):
            self._post()
            deadline = time.monotonic() + _LAST_WORDS_S
            while self._wire.sending and time.monotonic() < deadline:
                self._wire.test()
                time.sleep(1e-3)

    # The way out

    def _seal(self) -> None:
        self._post()
        while self._welcome and not self._finished and self._numbers and not self._session.unsent:
            if not self._begun and (self._peer_finished or self._is_worn()):
                self._finished = True
                self._session.write(_LENGTH.pack(0))
                self._post()
            elif self._waiting:
                self._seal_piece()
                self._carry()
            else:
                break
        if self._finished and self._peer_finished and not self._session.unsent:
            self._begin()

    def _seal_piece(self) -> None:
        chunk, rest = self._waiting[0]
        if not self._begun:
            self._begun = True
            self._session.write(_LENGTH.pack(len(rest)))
        self._session.write(rest[:_PIECE_BYTES])
        if rest := rest[_PIECE_BYTES:]:
            self._waiting[0] = chunk, rest
        else:
            self._waiting.popleft()
            self._begun = False
            self._unsent[chunk] -= 1
        self._post(chunk)

    def _post(self, chunk: int | None = None) -> None:
        """Hand what the session has sealed to the wire; a piece of a chunk is one message."""
        while self._numbers and (message := self._session.take(_WIRE_BYTES)):
            number = self._numbers.popleft()
            self._chunk_of[number] = chunk
            if chunk is not None:
                self._unsent[chunk] += 1
            self._wire.send(number, message)

    def _is_worn(self) -> bool:
        age_s = time.monotonic() - self._since
        return self._session.records_sent >= self._renew_records or age_s >= self._renew_s

    # The way in

    def _open(self) -> None:
        while self._read() and self._feed():
            pass

    def _read(self) -> bool:
        """Read all that can be read; whether there is room for more."""
        if not self._shake():
            return True
        if self._target is None:  # a chunk without a slot
            self._target = next(self._parser)
        while self._target is not None and (got := self._session.read_into(self._target)):
            self._target = self._target[got:] or next(self._parser)
        return self._target is not None

    def _feed(self) -> bool:
        """Give the session the next message; False if there is none."""
        if self._feeding is not None and self._ended is None:
            self._wire.repost(self._feeding)
        self._feeding = None
        self._carry()
        if not self._inbox:
            return False
        self._feeding, nbytes = self._inbox.popleft()
        self._session.feed(self._slots[self._feeding][:nbytes])
        return True

    def _parse(self) -> Iterator[memoryview | None]:
        """A session's plaintext: yields the memory to fill next, or None while there is none for a chunk."""
        head = memoryview(bytearray(_ANSWER.size))
        yield head
        kind, length = _ANSWER.unpack(head)
        if kind not in (_WELCOME, _REFUSED) or not 1 <= length <= _ANSWER_BYTES:
            raise ProtocolError(
                f"the other side's answer must be at most {_ANSWER_BYTES} bytes, got {length} of kind {kind}"
            )
        words = memoryview(bytearray(length))
        yield words
        if kind == _REFUSED:
            raise SecurityError(
                f"the other side refused: {bytes(words).decode(errors='replace')}", "a refusal by the other side"
            )
        self._check(bytes(words))
        self._welcome = True
        number = memoryview(bytearray(_LENGTH.size))
        while True:
            yield number
            (length,) = _LENGTH.unpack(number)
            if length == 0:
                break
            while not self._vacant:
                yield None
            slot = self._vacant.popleft()
            memory = self._receive_slots[slot]
            if length > len(memory):
                raise ProtocolError(f"a chunk from the other side must have at most {len(memory)} bytes, got {length}")
            yield memory[:length]
            self._opened.append((slot, length))
        self._peer_finished = True
        if self._session.unread:
            raise ProtocolError("nothing may follow the end of a TLS session before the next one, but something does")
        while True:
            yield None  # until the next session begins
