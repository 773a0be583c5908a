"""``every_step``: the clusters average their gradients before each optimizer step.

With the same parameters everywhere, k clusters then take the step that one job on the
concatenated batch would take. A lossy codec keeps what it did not send in its own state (error
feedback), and sends it with a later step's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.backend.backend import Backend, Flat, Vector
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.exchange import Exchange, name_fault
from paddlenlp_nebula.strategy.opening import Opening, common_guest, shares
from paddlenlp_nebula.strategy.reunion import Plane
from paddlenlp_nebula.tensors import gradient, set_gradient

__all__ = ["Average", "Contribution", "EveryStep", "apply_average"]

_NON_FINITE = 1  # flag of END


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
        values: the averaged gradient of all selected parameters.
        present: for each parameter whether any member has a gradient for it.
        share: this cluster's part of the average, 0..1.
        non_finite: members whose gradients were infinite or NaN: everybody must skip the step.
        batch_hashes: member -> hash of its first batch (round 1), else 0.
        ended_by: members that have taken their last step: there is no average, and nobody goes further.
        guest: a cluster that has come back, to be taken in after this step.
    """

    values: Flat
    present: list[bool]
    share: float
    non_finite: tuple[str, ...]
    batch_hashes: Mapping[str, int]
    ended_by: tuple[str, ...] = ()
    guest: str | None = None


class EveryStep:
    """The exchange of gradients, on a cluster's leader.

    Args:
        exchange: the parameters whose gradients travel, their codec, and the members.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._parts = range(len(exchange.buckets))

    def average(self, contribution: Contribution) -> Average:
        """Average the gradients over all members, weighted.

        Raises:
            NebulaError: a gradient is infinite or NaN although no scaler could skip the step, the
                members hold different parameters, or they are at different steps.
            PeerLost: see `Party.together`.
        """
        average = self.exchange.party.together(lambda number: self._round(number, contribution))
        self.exchange.commit(void=bool(average.non_finite))
        return average

    # When clusters come together again, see `reunion.Member`

    turns = 0

    def settle(self) -> None:
        """Between two steps there is nothing but the parameters, which nobody has hashed meanwhile."""
        self.exchange.refresh_digests()

    def brings(self, bucket: Bucket) -> Float32Vector:
        """The parameters in a bucket, in host memory."""
        return self.exchange.backend.to_host(self.exchange.read(bucket))

    def planes(self) -> list[Plane]:
        """The optimizer's state is on every process, not here alone."""
        return []

    def move(self, parameters: Float32Vector, turns: int, states: Sequence[Float32Vector]) -> Float32Vector:
        """All members go on from the same parameters."""
        for index, bucket in enumerate(self.exchange.buckets):
            self.exchange.digests[index] = HOST.digest(parameters[bucket.start : bucket.stop])
        return parameters

    def compare_final(self) -> None:
        """Compare the parameters once more, after the last step.

        A member that wanted to go on learns of the end in the same exchange, see `Average.ended_by`.
        """
        self.exchange.party.together(lambda number: self._open(number, None))

    def _round(self, number: int, contribution: Contribution) -> Average:
        openings = self._open(number, contribution)
        if ended_by := tuple(member for member, opening in openings.items() if opening.final):
            return Average(self.exchange.flat(()), [], 0.0, (), {}, ended_by)
        share = shares({member: opening.weight for member, opening in openings.items()}, number)
        faults: list[int] = []

        def produce(bucket: Bucket) -> Vector:
            return self._gradient(bucket, contribution, faults)

        def close_contribution() -> None:
            self._link.post(Kind.END, round=number, flags=_NON_FINITE if faults else 0)

        values = self.exchange.average(number, share, self._parts, produce, close_contribution)
        non_finite = self._non_finite(number, bool(faults))
        present = _unpack_bits([opening.present for opening in openings.values()], len(self._selection))
        hashes = {member: opening.batch_hash for member, opening in openings.items()}
        guest = common_guest(openings, self._link.clusters)
        return Average(values, present, float(share[self._link.cluster]), non_finite, hashes, guest=guest)

    def _open(self, number: int, contribution: Contribution | None) -> dict[str, Opening]:
        """Exchange the openings of a round; without a contribution this member says that it goes no further."""
        final = contribution is None
        ours = contribution or Contribution(step=0, weight=0.0)
        has = [not final and gradient(parameter) is not None for parameter in self._selection.parameters]
        present = np.packbits(has).tobytes()
        opening = Opening(ours.step, ours.weight, ours.batch_hash, 0.0, tuple(self.exchange.digests), present, final)
        openings = self.exchange.open(number, opening, "at the end" if final else f"before round {number}")
        for member, theirs in openings.items():
            if not final and not theirs.final and theirs.step != ours.step:
                raise NebulaError(
                    f"all clusters must be at the same step in round {number}, but {self._link.cluster!r} is at "
                    f"{ours.step} and {member!r} at {theirs.step}: do both skip the same data?"
                )
        return openings

    def _gradient(self, bucket: Bucket, contribution: Contribution, faults: list[int]) -> Vector:
        """The gradients in a bucket, unscaled; zeros, and noted in ``faults``, if a scaler may skip infinite ones."""
        backend, vector = self.exchange.backend, self._gather(bucket)
        if fault := name_fault(self.exchange, bucket, vector, "gradient", f"at step {contribution.step}"):
            if not contribution.scaled:
                raise fault
            faults.append(bucket.index)
            backend.fill(vector, 0.0)
        elif contribution.loss_scale != 1.0:
            backend.scale(vector, np.float32(1.0 / contribution.loss_scale))
        return vector

    def _gather(self, bucket: Bucket) -> Vector:
        return self.exchange.backend.gather(bucket, lambda index: gradient(self._selection.parameters[index]))

    def _non_finite(self, number: int, faulty: bool) -> tuple[str, ...]:
        """The members whose END says that their gradients were not finite."""
        found = []
        for member in self._link.members:
            if member == self._link.cluster:
                flags = _NON_FINITE if faulty else 0
            else:
                with self._link.receive(member, Kind.END, round=number) as message:
                    flags = message.frame.flags
            if flags & _NON_FINITE:
                found.append(member)
        return tuple(found)

    @property
    def _link(self) -> Link:
        return self.exchange.party.link

    @property
    def _selection(self) -> Selection:
        return self.exchange.selection


def apply_average(
    selection: Selection,
    values: Flat,
    present: Sequence[bool],
    *,
    skip: bool = False,
    loss_scale: float = 1.0,
    backend: Backend = HOST,
) -> None:
    """Put the averaged gradients in the place of this process' own.

    Args:
        selection: the parameters.
        values: the average.
        present: parameters without a gradient on any member keep none.
        skip: write infinities, so that every scaler skips the step and shrinks alike.
        loss_scale: this process' own, by which the average is multiplied.
        backend: that of the values.
    """
    for index, parameter in enumerate(selection.parameters):
        if present[index]:
            own = values[selection.offsets[index] : selection.offsets[index + 1]]
            if skip or loss_scale != 1.0:
                own = backend.copy(own)
            if skip:
                backend.fill(own, np.inf)
            elif loss_scale != 1.0:
                backend.scale(own, np.float32(loss_scale))
            set_gradient(parameter, own)


def _unpack_bits(packed: list[bytes], count: int) -> list[bool]:
    """Element-wise "or" of bit sets."""
    sets = [np.unpackbits(np.frombuffer(bits, np.uint8), count=count) for bits in packed]
    return [bool(bit) for bit in np.bitwise_or.reduce(sets)]
