"""Frames: the fixed-layout header in front of everything that crosses a link.

Nothing from a peer is trusted before it is checked here: magic, kind, length against a limit, and
after the payload its checksum. The checksum finds damage, not malice; authenticity is TLS's part.

Layout (big-endian, 44 bytes): magic 4s, kind u16, flags u16, epoch u32, round u64, part u32,
payload length u64, xxh3-64 of the payload u64, zero u32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from paddlenlp_nebula.errors import ProtocolError

__all__ = ["HEADER_BYTES", "MAX_PAYLOAD_BYTES", "NOTE_BYTES", "PROTOCOL_VERSION", "Frame", "Kind", "checksum"]

PROTOCOL_VERSION = 1

_HEADER = struct.Struct("!4sHHIQIQQI")
_MAGIC = b"NEB1"
HEADER_BYTES = _HEADER.size

MAX_PAYLOAD_BYTES = 64 << 20
"""Longest payload of one message; longer things are cut into parts by whoever sends them."""


class Kind(IntEnum):
    """What a message is."""

    KNOCK = 1  # to the door: who is there
    WELCOME = 2  # from the door
    REFUSED = 3
    PORT = 4  # an MPI port string, relayed by the door
    GONE = 5  # the door saw a connection close
    LEAVE = 6  # a cluster's own goodbye, with its reason
    BEAT = 7  # a sign of life
    HELLO = 10  # what a cluster is about to train
    PING = 11
    PONG = 12
    PARAMETERS = 13  # initial values, one bucket
    NOTE = 14  # a small JSON object: metrics, agreed numbers
    WAITING = 15  # "I am alive, and wait for somebody else"
    ROUND = 20  # opens a round: weight, step, digests; or says that there is none
    BUCKET = 21
    END = 22  # closes a member's contribution: finite or not
    VOTE = 23  # "I have everything of this round" (three clusters and more)
    EPOCH = 24  # a new member list, proposed after a loss
    PRESENT = 30  # to a cluster that is no member: who is a member here
    INVITE = 31  # to one that has come back: it is a member from here on
    ACCEPT = 32  # and so it says, too
    REUNION = 33  # a small JSON object: what the clusters that come together bring
    DIGESTS = 34  # a hash of each bucket that the sender has
    QUESTION = 40  # a student asks its teacher about a batch
    ANSWER = 41
    UNANSWERED = 42  # a small JSON object: why there is no answer


_KINDS = frozenset(Kind)

NOTE_BYTES = 64 << 10
"""Longest small JSON object."""

_EMPTY = (Kind.PING, Kind.PONG, Kind.WAITING, Kind.END, Kind.VOTE)
_LONG = (Kind.PARAMETERS, Kind.ROUND, Kind.BUCKET, Kind.DIGESTS, Kind.QUESTION, Kind.ANSWER)
_LIMITS = {kind: 0 if kind in _EMPTY else NOTE_BYTES for kind in Kind if kind not in _LONG}


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """The 64-bit xxh3 of a contiguous payload."""
    return xxhash.xxh3_64_intdigest(payload)


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed header.

    Attributes:
        kind: what the message is.
        length: payload bytes that follow.
        epoch: number of the member list the sender works under.
        round: exchange number, from 1; 0 outside of rounds.
        part: bucket number within a round; of an ANSWER, microseconds that the teacher took for it.
        flags: meaning depends on ``kind``; of an ANSWER, how many questions waited when the teacher began.
        checksum: xxh3-64 of the payload.
    """

    kind: Kind
    length: int
    epoch: int = 0
    round: int = 0
    part: int = 0
    flags: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        """The 44 bytes of this header."""
        return _HEADER.pack(
            _MAGIC, self.kind, self.flags, self.epoch, self.round, self.part, self.length, self.checksum, 0
        )

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, *, sender: str, limit: int = MAX_PAYLOAD_BYTES) -> Frame:
        """Read and check a header at the start of ``data``.

        Args:
            data: at least ``HEADER_BYTES`` bytes.
            sender: who sent it, for the error's sentence.
            limit: longest acceptable payload, bytes; some kinds have a stricter one.

        Raises:
            ProtocolError: too short, wrong magic, unknown kind, non-zero padding or too long a payload.
        """
        if len(data) < HEADER_BYTES:
            raise ProtocolError(f"a frame from {sender} must start with {HEADER_BYTES} header bytes, got {len(data)}")
        magic, kind, flags, epoch, number, part, length, digest, zero = _HEADER.unpack_from(data)
        if magic != _MAGIC or zero != 0:
            raise ProtocolError(
                f"a frame from {sender} must start with {_MAGIC!r} (protocol version {PROTOCOL_VERSION}), got {magic!r}: "
                "is something else using this address?"
            )
        if kind not in _KINDS:
            raise ProtocolError(f"a frame from {sender} has the unknown kind {kind}")
        limit = min(limit, _LIMITS.get(Kind(kind), limit))
        if length > limit:
            raise ProtocolError(
                f"a {Kind(kind).name} frame from {sender} announces {length} bytes, the limit is {limit}"
            )
        return cls(Kind(kind), length, epoch, number, part, flags, digest)

    def verify(self, payload: bytes | bytearray | memoryview, *, sender: str) -> None:
        """Check a complete payload against the header.

        Raises:
            ProtocolError: the payload was damaged on the way.
        """
        if checksum(payload) != self.checksum:
            raise ProtocolError(
                f"the payload of a {self.kind.name} frame from {sender} (round {self.round}, part {self.part}, "
                f"{self.length} bytes) does not match its checksum: the link damages data"
            )
