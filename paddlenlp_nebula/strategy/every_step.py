"""``every_step``: the clusters average their gradients before each optimizer step.

With the same parameters everywhere, k clusters then take the step that one job on the
concatenated batch would take. All members reduce the same decoded payloads in the same order, so
their sums are bit-identical; a digest of the parameters travels with every round to prove it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.buckets import Bucket, cut, digests, gather
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Turn
from paddlenlp_nebula.errors import NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import Kind, checksum
from paddlenlp_nebula.link.gather import all_gather
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.tensors import gradient, set_gradient

__all__ = ["Average", "Contribution", "EveryStep", "apply_average"]

_ROUND = struct.Struct("!QdQ")  # step, weight, hash of the first batch; then digests and the presence bits
_NON_FINITE = 1  # flag of END
_FINAL = 1  # flag of ROUND: this member takes no further step


@dataclass(frozen=True, slots=True)
class Contribution:
    """What this cluster brings to a round besides its gradients.

    Attributes:
        step: optimizer step the gradients are for, from 1.
        weight: samples or tokens behind the gradients, or 1.
        loss_scale: factor the gradients carry (fp16 scaler), else 1.
        scaled: whether a scaler can skip the step, so that infinities are no error.
        batch_hash: hash of the first batch (round 1), else 0.
    """

    step: int
    weight: float
    loss_scale: float = 1.0
    scaled: bool = False
    batch_hash: int = 0


@dataclass(frozen=True, slots=True)
class Average:
    """The outcome of a round.

    Attributes:
        values: the averaged gradient of all selected parameters, shape (selection.numel,).
        present: for each parameter whether any member has a gradient for it.
        share: this cluster's part of the average, 0..1.
        non_finite: members whose gradients were infinite or NaN: everybody must skip the step.
        batch_hashes: member -> hash of its first batch (round 1), else 0.
        ended_by: members that have taken their last step: there is no average, and nobody goes further.
    """

    values: Float32Vector
    present: list[bool]
    share: float
    non_finite: tuple[str, ...]
    batch_hashes: Mapping[str, int]
    ended_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Opening:
    """A member's ROUND message, parsed."""

    step: int
    weight: float
    batch_hash: int
    digests: tuple[int, ...]
    present: bytes
    final: bool = False


class EveryStep:
    """The exchange of gradients, on a cluster's leader.

    Args:
        selection: the parameters whose gradients travel.
        codec: their form on the wire.
        party: the members.

    Attributes:
        digests: a 64-bit hash of each bucket of the parameters, as of the last refresh.
    """

    def __init__(self, selection: Selection, codec: Codec, party: Party) -> None:
        self._selection = selection
        self._codec = codec
        self.party = party
        self._buckets = cut(selection)
        self.digests = digests(self._buckets, selection)

    @property
    def buckets(self) -> list[Bucket]:
        """The selection's buckets."""
        return self._buckets

    def average(self, contribution: Contribution) -> Average:
        """Average the gradients over all members, weighted.

        Raises:
            NebulaError: a gradient is infinite or NaN although no scaler could skip the step, the
                members hold different parameters, or they are at different steps.
            PeerLost: see `Party.together`.
        """
        return self.party.together(lambda number: self._exchange(number, contribution))

    def parameter_bucket(self, bucket: Bucket) -> Float32Vector:
        """The present values of the parameters in a bucket."""
        return gather(bucket, self._selection.parameters.__getitem__)

    def parameter_digest(self) -> str:
        """One hash of all selected parameters, from the buckets' digests."""
        return f"{checksum(struct.pack(f'!{len(self.digests)}Q', *self.digests)):016x}"

    def refresh_digests(self) -> None:
        """Hash the parameters after an optimizer step."""
        self.digests = digests(self._buckets, self._selection)

    def compare_digests(self, others: Mapping[str, tuple[int, ...]], when: str) -> None:
        """Check that all members hold the same parameters.

        Raises:
            NebulaError: naming the first differing bucket and its parameters.
        """
        own = tuple(self.digests)
        for member, theirs in others.items():
            if theirs == own:
                continue
            index = next(i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1])
            names = [self._selection.names[piece[0]] for piece in self._buckets[index].pieces]
            raise NebulaError(
                f"clusters {self.party.link.cluster!r} and {member!r} must hold identical parameters {when}, but "
                f"bucket {index} of {len(own)} differs ({names[0]} ... {names[-1]}): unlike hardware rounds "
                "differently, the optimizers differ (a custom one, or another checkpoint's state), or something changed "
                "parameters on one side only"
            )

    def compare_final(self) -> None:
        """Compare the parameters once more, after the last step.

        A member that wanted to go on learns of the end in the same exchange, see `Average.ended_by`.
        """
        self.party.together(lambda number: self._open(self.party.link, number, None))

    def _exchange(self, number: int, contribution: Contribution) -> Average:
        link = self.party.link
        openings = self._open(link, number, contribution)
        if ended_by := tuple(member for member, opening in openings.items() if opening.final):
            return Average(np.empty(0, dtype=np.float32), [], 0.0, (), {}, ended_by)
        weights = {member: openings[member].weight for member in link.members}
        total = sum(weights.values())
        if not total > 0:
            raise NebulaError(
                f"round {number} needs a positive total weight, got {weights}: no cluster saw a sample or token in this "
                "step; sync_weight='equal' averages them all the same"
            )
        share = {member: np.float32(weight / total) for member, weight in weights.items()}
        faults: list[str] = []
        values = np.empty(self._selection.numel, dtype=np.float32)  # the first member fills it; zeros cost page faults
        scratch = np.empty(self._buckets[0].numel, dtype=np.float32)
        produce = self._producer(contribution, faults)

        def close_contribution() -> None:
            link.post(Kind.END, round=number, flags=_NON_FINITE if faults else 0)

        contributions = all_gather(link, Kind.BUCKET, number, len(self._buckets), produce, close_contribution)
        for part, member, payload in contributions:
            bucket = self._buckets[part]
            try:
                decoded = self._codec.decode(payload, bucket.layout)
            except ProtocolError as error:
                raise PeerLost(member, f"its bucket {part} does not decode: {error}") from error
            target = values[bucket.start : bucket.stop]
            if member == link.members[0]:
                np.multiply(decoded, share[member], out=target)
            else:
                np.multiply(decoded, share[member], out=scratch[: bucket.numel])
                target += scratch[: bucket.numel]
        non_finite = self._non_finite(link, number, bool(faults))
        present = _unpack_bits([opening.present for opening in openings.values()], len(self._selection))
        hashes = {member: opening.batch_hash for member, opening in openings.items()}
        return Average(values, present, float(share[link.cluster]), non_finite, hashes)

    def _open(self, link: Link, number: int, contribution: Contribution | None) -> dict[str, _Opening]:
        """Exchange the openings of a round; without a contribution this member says that it goes no further."""
        final = contribution is None
        ours = contribution or Contribution(step=0, weight=0.0)
        has = [not final and gradient(parameter) is not None for parameter in self._selection.parameters]
        opening = (
            _ROUND.pack(ours.step, ours.weight, ours.batch_hash)
            + struct.pack(f"!{len(self.digests)}Q", *self.digests)
            + np.packbits(has).tobytes()
        )
        flags = _FINAL if final else 0
        link.post(Kind.ROUND, opening, round=number, flags=flags)
        openings = {}
        for member in link.members:
            if member == link.cluster:
                openings[member] = self._parse_opening(opening, member, flags)
            else:
                with link.receive(member, Kind.ROUND, round=number) as message:
                    openings[member] = self._parse_opening(bytes(message.payload), member, message.frame.flags)
        for member, theirs in openings.items():
            if not final and not theirs.final and theirs.step != ours.step:
                raise NebulaError(
                    f"all clusters must be at the same step in round {number}, but {link.cluster!r} is at "
                    f"{ours.step} and {member!r} at {theirs.step}: do both skip the same data?"
                )
        when = "at the end" if final else f"before round {number}"
        self.compare_digests({member: theirs.digests for member, theirs in openings.items()}, when)
        return openings

    def _parse_opening(self, payload: bytes, member: str, flags: int) -> _Opening:
        count, bits = len(self._buckets), -(-len(self._selection) // 8)
        wanted = _ROUND.size + 8 * count + bits
        if len(payload) != wanted:
            raise ProtocolError(f"a ROUND message from cluster {member!r} must be {wanted} bytes, got {len(payload)}")
        step, weight, batch_hash = _ROUND.unpack_from(payload)
        if not 0 <= weight < float("inf"):
            raise ProtocolError(f"the weight of cluster {member!r} must be finite and not negative, got {weight}")
        hashes = struct.unpack_from(f"!{count}Q", payload, _ROUND.size)
        return _Opening(step, weight, batch_hash, hashes, payload[-bits:], bool(flags & _FINAL))

    def _producer(self, contribution: Contribution, faults: list[str]) -> Callable[[int], memoryview]:
        inverse = np.float32(1.0 / contribution.loss_scale)

        def produce(part: int) -> memoryview:
            bucket = self._buckets[part]
            vector = gather(bucket, lambda index: gradient(self._selection.parameters[index]))
            # A float64 sum of finite float32 numbers is finite, so one pass settles it.
            with np.errstate(invalid="ignore"):
                total = np.add.reduce(vector, dtype=np.float64)
            if not np.isfinite(total):
                if not contribution.scaled:
                    raise NebulaError(self._name_fault(bucket, vector, contribution.step))
                faults.append(str(part))
                vector = np.zeros_like(vector)
            if contribution.loss_scale != 1.0:
                vector *= inverse
            try:
                return self._codec.encode(vector, bucket.layout, {}, Turn(contribution.step, part, 0))
            except OverflowError as error:
                names = ", ".join(dict.fromkeys(self._selection.names[piece[0]] for piece in bucket.pieces))
                raise NebulaError(
                    f"a gradient does not fit into sync_codec={self._codec.spec!r} at step {contribution.step} "
                    f"(in {names[:200]}): {error}"
                ) from None

        return produce

    def _name_fault(self, bucket: Bucket, vector: Float32Vector, step: int) -> str:
        at = 0
        for index, start, stop in bucket.pieces:
            piece = vector[at : at + stop - start]
            at += stop - start
            bad = int((~np.isfinite(piece)).sum())
            if bad:
                return (
                    f"the gradient of {self._selection.names[index]!r} must be finite, got {bad} infinite or NaN of "
                    f"{len(piece)} elements at step {step}: lower the learning rate or look at the data of this step"
                )
        raise AssertionError("a bucket that is not finite has an element that is not")

    def _non_finite(self, link: Link, number: int, faulty: bool) -> tuple[str, ...]:
        """The members whose END says that their gradients were not finite."""
        found = []
        for member in link.members:
            if member == link.cluster:
                flags = _NON_FINITE if faulty else 0
            else:
                with link.receive(member, Kind.END, round=number) as message:
                    flags = message.frame.flags
            if flags & _NON_FINITE:
                found.append(member)
        return tuple(found)


def apply_average(
    selection: Selection, values: Float32Vector, present: Sequence[bool], *, skip: bool = False, loss_scale: float = 1.0
) -> None:
    """Put the averaged gradients in the place of this process' own.

    Args:
        selection: the parameters.
        values: the average, shape (selection.numel,).
        present: parameters without a gradient on any member keep none.
        skip: write infinities, so that every scaler skips the step and shrinks alike.
        loss_scale: this process' own, by which the average is multiplied.
    """
    for index, parameter in enumerate(selection.parameters):
        if present[index]:
            own = values[selection.offsets[index] : selection.offsets[index + 1]]
            if skip:
                own = np.full_like(own, np.inf)
            elif loss_scale != 1.0:
                own = own * np.float32(loss_scale)
            set_gradient(parameter, own)


def _unpack_bits(packed: list[bytes], count: int) -> list[bool]:
    """Element-wise "or" of bit sets."""
    sets = [np.unpackbits(np.frombuffer(bits, np.uint8), count=count) for bits in packed]
    return [bool(bit) for bit in np.bitwise_or.reduce(sets)]
