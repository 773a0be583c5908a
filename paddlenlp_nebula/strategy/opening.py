"""The ROUND message with which every member opens a round, before any payload."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["FINAL", "Opening", "common_guest", "first_difference", "guest_bits", "majority", "shares"]

FINAL = 1
"""Flag of a ROUND frame: this member takes no further step."""
_LARGEST_WEIGHT = 2.0**63  # samples or tokens; the sum of all must not become infinite, or every share would be 0
# Step, weight, hash of the first batch, seconds per step, guests; then digests and presence bits.
_HEAD = struct.Struct("!QdQdQ")


@dataclass(frozen=True, slots=True)
class Opening:
    """What a member says of itself at the start of a round.

    Attributes:
        step: optimizer step that it has reached, from 1.
        weight: samples or tokens behind its contribution, or 1.
        batch_hash: hash of its first batch (round 1), else 0.
        step_s: seconds that one of its optimizer steps takes, 0 if unknown.
        digests: a 64-bit hash of each bucket of its parameters.
        present: a bit for each parameter: whether it contributes to it.
        final: it takes no further step.
        guests: a bit for each cluster of the run: whether it has come back, as far as the member can see.
    """

    step: int
    weight: float
    batch_hash: int
    step_s: float
    digests: tuple[int, ...]
    present: bytes = b""
    final: bool = False
    guests: int = 0

    def pack(self) -> bytes:
        """The message's payload; ``final`` travels as a flag of the frame."""
        head = _HEAD.pack(self.step, self.weight, self.batch_hash, self.step_s, self.guests)
        return head + struct.pack(f"!{len(self.digests)}Q", *self.digests) + self.present

    @classmethod
    def parse(cls, payload: bytes, flags: int, *, member: str, buckets: int, present_bytes: int) -> Opening:
        """A member's message.

        Raises:
            ProtocolError: it is not what ``pack`` produces for this many buckets and bytes of presence bits.
        """
        wanted = _HEAD.size + 8 * buckets + present_bytes
        if len(payload) != wanted:
            raise ProtocolError(f"a ROUND message from cluster {member!r} must be {wanted} bytes, got {len(payload)}")
        step, weight, batch_hash, step_s, guests = _HEAD.unpack_from(payload)
        if not 0 <= weight <= _LARGEST_WEIGHT:
            raise ProtocolError(
                f"the weight of cluster {member!r} must be finite and not negative, {_LARGEST_WEIGHT:g} at most, got {weight}"
            )
        if not 0 <= step_s < float("inf"):
            raise ProtocolError(f"the seconds per step of cluster {member!r} must be finite, got {step_s}")
        digests = struct.unpack_from(f"!{buckets}Q", payload, _HEAD.size)
        present = payload[_HEAD.size + 8 * buckets :]
        return cls(step, weight, batch_hash, step_s, digests, present, bool(flags & FINAL), guests)


def guest_bits(guests: Collection[str], clusters: Sequence[str]) -> int:
    """What `Opening.guests` says of some clusters."""
    return sum(1 << place for place, name in enumerate(clusters) if name in guests)


def common_guest(openings: Mapping[str, Opening], clusters: Sequence[str]) -> str | None:
    """The first cluster that all members say has come back; nobody is taken in when some end earlier than others."""
    common = -1 if len({opening.final for opening in openings.values()}) == 1 else 0
    for opening in openings.values():
        common &= opening.guests
    return next((name for place, name in enumerate(clusters) if common >> place & 1), None)


def first_difference(digests: Sequence[tuple[int, ...]]) -> int | None:
    """The first bucket that not all members hold alike."""
    return next((bucket for bucket, hashes in enumerate(zip(*digests, strict=True)) if len(set(hashes)) > 1), None)


def majority(digests: Mapping[str, tuple[int, ...]]) -> tuple[str, ...] | None:
    """The members that hold what more than half of all hold, in order; None if no more than half agree."""
    most, count = Counter(digests.values()).most_common(1)[0]
    return tuple(name for name, held in digests.items() if held == most) if 2 * count > len(digests) else None


def shares(weights: Mapping[str, float], number: int) -> dict[str, np.float32]:
    """Weights that sum to 1.

    Raises:
        NebulaError: all are zero.
    """
    total = sum(weights.values())
    if not total > 0:
        raise NebulaError(
            f"round {number} needs a positive total weight, got {dict(weights)}: no cluster saw a sample or token since "
            "the last one; sync_weight='equal' averages them all the same"
        )
    return {member: np.float32(weight / total) for member, weight in weights.items()}
