"""``local_steps``: each cluster trains by itself for some steps, then all average what has changed.

The change since the last round travels (the negative pseudo-gradient of DiLoCo, arXiv 2311.08105),
an outer optimizer applies its average to the parameters of the last round (the anchor), and
everybody goes on from there. The inner optimizer's state stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.backend.backend import Flat, Vector
from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, described
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.exchange import Exchange, name_fault
from paddlenlp_nebula.strategy.opening import Opening, common_guest, shares
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.strategy.product import ProductMerge
from paddlenlp_nebula.strategy.reunion import Plane

__all__ = ["LocalSteps", "LocalWork", "Merge", "apply_merge"]


@dataclass(frozen=True, slots=True)
class LocalWork:
    """What a cluster has done since its last round.

    Attributes:
        step: optimizer steps in all.
        weight: samples or tokens since the last round, or 1.
        step_s: seconds that a step took, 0 if unknown.
        batch_hash: hash of the first batch (round 1), else 0.
        final: it takes no further step.
        meets: it would take in a cluster that has come back: not if it ends before its time.
    """

    step: int
    weight: float
    step_s: float = 0.0
    batch_hash: int = 0
    final: bool = False
    meets: bool = True


@dataclass(frozen=True, slots=True)
class Merge:
    """The outcome of a round.

    Attributes:
        parts: the buckets that have new values.
        values: these values, one bucket after the other.
        shares: member -> its part of the average, 0..1.
        fastest_step_s: seconds per step of the fastest member, 0 if unknown.
        batch_hashes: member -> hash of its first batch (round 1), else 0.
        final: nobody takes a further step.
        ended_by: members that take no further step although this one would: nobody goes further.
        split: some members end here and others do not, so nobody is to be met after this round.
        guest: a cluster that has come back, to be taken in now.
    """

    parts: tuple[int, ...]
    values: Flat
    shares: Mapping[str, np.float32]
    fastest_step_s: float
    batch_hashes: Mapping[str, int]
    final: bool
    ended_by: tuple[str, ...]
    split: bool = False
    guest: str | None = None


class LocalSteps:
    """The exchange of parameter changes, on a cluster's leader.

    Args:
        exchange: the parameters whose changes travel, their codec, and the members.
        outer: the outer optimizer.
        fragments: the parameters are cut into this many parts, one of which is exchanged per round
            (Streaming DiLoCo, arXiv 2501.18512), in strides: bucket b belongs to fragment b mod fragments.
        same_step: all members take the same number of steps between rounds.
        final_codec: encodes the last round, together with all that a lossy codec has not sent by then, so that no
            work is lost; None: the exchange's own codec does.
        product: merges LoRA pairs by their products instead of averaging their changes, on the host's backend; every
            member keeps the anchors of all others for that.
        keep_unsent: go on from the anchor plus this member's own unsent change, instead of from the anchor: a member
            keeps what it has learned until the others have it too (our choice; compare CHOCO-SGD, arXiv 1902.00340,
            where each node steps from its own parameters and gossips compressed differences).

    Attributes:
        anchor: the selected parameters as of the last round.
        anchors: member -> its anchor; with ``product`` those of all members, otherwise this one's, which is everybody's.
    """

    def __init__(
        self,
        exchange: Exchange,
        outer: OuterOptimizer,
        fragments: int = 1,
        *,
        same_step: bool,
        final_codec: Codec | None = None,
        keep_unsent: bool = False,
        product: ProductMerge | None = None,
    ) -> None:
        self.exchange = exchange
        self._backend = exchange.backend
        self._final_codec = final_codec
        self._keep_unsent = keep_unsent
        self._product = product
        self._outer = outer
        self._fragments = fragments
        self._same_step = same_step
        self.anchor = exchange.flat()
        self.anchors = {exchange.party.link.cluster: self.anchor}
        self._velocity = exchange.flat() if outer.has_velocity else None
        self._weights = np.zeros(fragments, dtype=np.float64)  # since each fragment's last round
        self._turns = np.zeros(1, dtype=np.int64)  # rounds that have been merged
        self.rebase()

    def rebase(self) -> None:
        """Take the present parameters for those of the last round."""
        for bucket in self.exchange.buckets:
            self._backend.assign(self.anchor[bucket.start : bucket.stop], self.exchange.read(bucket))
        self._hash_anchors()

    def begin(self, vectors: Mapping[str, Float32Vector]) -> Float32Vector:
        """With ``product``: the members' parameters as they were built; returns those that this member starts from."""
        assert self._product is not None
        for member, anchor in self._product.begin(vectors).items():
            self._backend.load(self.anchors.setdefault(member, self.exchange.flat()), anchor)
        self._hash_anchors()
        return self._backend.to_host(self.anchor)

    def merge(self, work: LocalWork) -> Merge:
        """Average the changes over all members, weighted, and take an outer step.

        In the last round, which any member may call, all fragments are merged.

        Raises:
            NebulaError: a parameter is infinite or NaN, the members held different parameters after
                the last round, or they are at different steps.
            PeerLost: see `Party.together`.
        """
        self._weights += work.weight
        party = self.exchange.party
        merge, changes = party.together(lambda number: self._round(number, work))
        self.exchange.commit(void=not merge.parts)
        if not merge.parts:  # alone, or nothing has changed since the last round
            self.rebase()
            self._weights[:] = 0
            return merge
        if self._product is not None:
            arrays = self._backend.to_host  # on the host a flat is its array
            anchors = {member: arrays(self.anchors[member]) for member in party.link.members}
            self._product.merge(anchors, {member: arrays(flat) for member, flat in changes.items()}, merge.shares)
            self._product.clear(arrays(merge.values))
        self._step(merge)
        self._turns += 1
        self._hash_anchors(merge.parts)
        self._weights[sorted({part % self._fragments for part in merge.parts})] = 0
        return merge

    def _step(self, merge: Merge) -> None:
        """Take the outer step, and put into ``merge.values`` where it leads to."""
        at = 0
        for part in merge.parts:
            bucket = self.exchange.buckets[part]
            place = slice(bucket.start, bucket.stop)
            values = merge.values[at : at + bucket.numel]
            velocity = self._velocity[place] if self._velocity is not None else None
            for anchor in self.anchors.values():
                self._outer.step(self._backend, anchor[place], values, velocity)
            if merge.final and (unsent := self.exchange.unsent(part)) is not None:
                self._backend.fill(unsent, 0.0)
            self._backend.assign(values, self._base(bucket))
            at += bucket.numel

    def _base(self, bucket: Bucket) -> Vector:
        """Where this member's local steps begin, in a bucket."""
        anchor = self.anchor[bucket.start : bucket.stop]
        unsent = self.exchange.unsent(bucket.index) if self._keep_unsent else None
        return anchor if unsent is None else anchor + unsent

    # When clusters come together again, see `reunion.Member`

    @property
    def turns(self) -> int:
        """Rounds that have been merged: which fragment is next."""
        return int(self._turns[0])

    def settle(self) -> None:
        """What this member has done alone is its anchor now."""
        for bucket in self.exchange.buckets:
            if (unsent := self.exchange.unsent(bucket.index)) is not None:
                self._backend.fill(unsent, 0.0)
        self._weights[:] = 0
        self.rebase()

    def brings(self, bucket: Bucket) -> Float32Vector:
        """The anchor in a bucket, in host memory."""
        return self._backend.to_host(self.anchor[bucket.start : bucket.stop])

    def planes(self) -> list[Plane]:
        """The outer velocity, if there is any."""
        if (velocity := self._velocity) is None:
            return []
        return [Plane(self.exchange.buckets, lambda b: self._backend.to_host(velocity[b.start : b.stop]))]

    def move(self, parameters: Float32Vector, turns: int, states: Sequence[Float32Vector]) -> Float32Vector:
        """Go on from another anchor: what has been done since a fragment's last round is kept. ``parameters`` is reused."""
        self._turns[:] = turns
        if states and self._velocity is not None:
            self._backend.load(self._velocity, states[0])
        for bucket in self.exchange.buckets:
            place = slice(bucket.start, bucket.stop)
            since = self._weights[bucket.index % self._fragments] > 0
            change = self.exchange.read(bucket)
            self._backend.subtract(change, self._base(bucket))
            self._backend.load(self.anchor[place], parameters[place])
            own = self._backend.copy(self._base(bucket))
            if since:
                self._backend.add(own, change)
            parameters[place] = self._backend.to_host(own)
        self._hash_anchors()
        return parameters

    def compare_final(self, step: int) -> None:
        """Compare the parameters once more, after the last round."""
        opening = Opening(step, 0.0, 0, 0.0, tuple(self.exchange.digests), final=True)
        self.exchange.party.together(lambda number: self.exchange.open(number, opening, "at the end"))

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """What a checkpoint must keep besides the parameters."""
        arrays: dict[str, npt.NDArray[np.generic]] = {"weights": self._weights, "turns": self._turns}
        arrays |= {name: self._backend.to_host(flat) for name, flat in self._flats().items()}
        return arrays | self.exchange.state()

    def restore(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Continue from a checkpoint.

        Raises:
            NebulaError: it is another cluster's, or was written with other settings.
        """
        whose = [name.removeprefix("anchor.") for name in arrays if name.startswith("anchor.")]
        cluster = self.exchange.party.link.cluster
        if whose and cluster not in whose:
            raise NebulaError(
                f"cluster {cluster!r} must resume from a checkpoint of its own, got what cluster {whose[0]!r} had not sent: to "
                "resume everybody from copies of one checkpoint, take nebula_state.safetensors out of all of them"
            )
        for name in arrays:
            if name.startswith("anchor."):  # with ``product`` there is one for each member
                self.anchors.setdefault(name.removeprefix("anchor."), self.exchange.flat())
        own = {name: array for name, array in self.state().items() if "/" not in name}
        found = {name: array for name, array in arrays.items() if "/" not in name}
        if described(own) != described(found):
            raise NebulaError(
                f"the checkpoint's state of sync_strategy='local_steps' must hold {described(own)}, got {described(found)}: "
                "resume with the sync_strategy, sync_outer, sync_fragments and parameters that it was written with"
            )
        self._weights[:], self._turns[:] = found["weights"], found["turns"]
        for name, flat in self._flats().items():
            self._backend.load(flat, found[name])
        self._hash_anchors()
        self.exchange.restore(arrays)

    def _flats(self) -> dict[str, Flat]:
        """Name in a checkpoint -> flat."""
        anchors = {f"anchor.{member}": anchor for member, anchor in self.anchors.items()}
        return anchors if self._velocity is None else {**anchors, "velocity": self._velocity}

    def _hash_anchors(self, parts: Iterable[int] | None = None) -> None:
        """Hash what the members have in common: between two rounds the parameters are each cluster's own."""
        anchors = [self.anchors[name] for name in self.exchange.party.link.members if name in self.anchors]
        for part in range(len(self.exchange.buckets)) if parts is None else parts:
            bucket = self.exchange.buckets[part]
            vectors = [anchor[bucket.start : bucket.stop] for anchor in anchors]
            self.exchange.digests[part] = self._backend.digest(*vectors)

    def _round(self, number: int, work: LocalWork) -> tuple[Merge, dict[str, Flat]]:
        link = self.exchange.party.link
        fragment = int(self._turns[0]) % self._fragments
        digests = tuple(self.exchange.digests)
        weight = float(self._weights[fragment])
        opening = Opening(work.step, weight, work.batch_hash, work.step_s, digests, final=work.final)
        openings = self.exchange.open(number, opening, f"after round {number - 1}", meets=work.meets)
        enders = tuple(member for member, theirs in openings.items() if theirs.final)
        final = bool(enders)
        if self._same_step and not final:
            for member, theirs in openings.items():
                if theirs.step != work.step:
                    raise NebulaError(
                        f"all clusters must be at the same step in round {number}, but {link.cluster!r} is at "
                        f"{work.step} and {member!r} at {theirs.step}: set the same sync_every and max_steps, or "
                        "sync_every='auto-balance'"
                    )
        buckets = self.exchange.buckets
        parts = tuple(bucket.index for bucket in buckets if final or bucket.index % self._fragments == fragment)
        weights = {member: theirs.weight for member, theirs in openings.items()}
        idle = final and not any(weights.values())  # everybody ends right after a round: only what is unsent is left
        share = shares(dict.fromkeys(weights, 1.0) if idle else weights, number)
        speeds = [theirs.step_s for theirs in openings.values()]
        hashes = {member: theirs.batch_hash for member, theirs in openings.items()}
        if len(openings) == 1 or (idle and self._final_codec is None):
            parts = ()

        def produce(bucket: Bucket) -> Vector:
            change = self.exchange.read(bucket)
            self._backend.subtract(change, self._base(bucket))
            where = f"after step {work.step}"
            if fault := name_fault(self.exchange, bucket, change, "change", where):
                raise fault
            return change

        final_codec = self._final_codec if final and parts else None
        changes: dict[str, Flat] = {}
        if self._product is None:
            values = self.exchange.average(number, share, parts, produce, final=final_codec)
        else:
            changes, values = self.exchange.collect(number, parts, produce, final_codec), self.exchange.flat(parts)
            for member, change in changes.items():
                self._backend.add(values, change, share[member])
        ended_by = () if work.final else enders
        guest = common_guest(openings, link.clusters)
        split = 0 < len(enders) < len(openings)
        return Merge(parts, values, share, min(speeds), hashes, final, ended_by, split, guest), changes


def apply_merge(
    selection: Selection,
    buckets: Sequence[Bucket],
    parts: Sequence[int],
    values: Flat,
    put: Callable[[int, Vector], None],
) -> None:
    """Hand a merge's values to their parameters.

    Args:
        selection, buckets: as the leader has them; if not all are in ``parts``, no bucket cuts a parameter.
        parts, values: see `Merge`.
        put: called with a parameter's number and its new values, shape (its numel,).
    """
    if len(parts) == len(buckets):
        for index in range(len(selection)):
            put(index, values[selection.offsets[index] : selection.offsets[index + 1]])
        return
    at = 0
    for part in parts:
        for index, start, stop in buckets[part].pieces:
            put(index, values[at : at + stop - start])
            at += stop - start
