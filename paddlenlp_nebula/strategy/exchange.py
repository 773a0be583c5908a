"""What every strategy does in a round: open it, and average one vector per member, bucket by bucket.

All members reduce the same decoded payloads in the same order, their own included, so their sums
are bit-identical; digests of the parameters travel with every opening to prove it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.backend.backend import Backend, Encoder, Flat, Remembered, Vector
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.buckets import BUCKET_NUMEL, Bucket, cut
from paddlenlp_nebula.codec.codec import Codec, State, Turn, described
from paddlenlp_nebula.errors import ConfigurationError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import Kind, checksum
from paddlenlp_nebula.link.gather import all_gather
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.privacy.protection import UNPROTECTED, Protection
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.opening import FINAL, Opening, first_difference, guest_bits, majority
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Exchange", "buckets_for", "name_fault"]

_KEY = re.compile(r"codec/(\d+)/(\w+)")
_SPEC = "codec/spec"


class Exchange:
    """The selected parameters in buckets, their codec with its state, and the members, on a cluster's leader.

    Args:
        selection: the parameters.
        codec: the form of their gradients or changes on the wire.
        party: the members.
        fragments: into how many parts the buckets are dealt out, see `buckets_for`.
        source: parameter number -> the tensor that holds its values: a float32 master weight, say; by default itself.
        backend: where vectors are kept and encoded.
        protection: what hides this member's contribution to an average; on the host's backend only.
        resync: members whose parameters differ from those of the majority are lost, and may come back for the right ones.

    Attributes:
        diverged: this member was lost for that reason, and has not come back.
        selection, party, backend: as given.
        buckets: the selection, cut.
        digests: a 64-bit hash of each bucket of the parameters, as of the last refresh.
    """

    def __init__(
        self,
        selection: Selection,
        codec: Codec,
        party: Party,
        fragments: int = 1,
        source: Callable[[int], Tensor] | None = None,
        backend: Backend = HOST,
        protection: Protection = UNPROTECTED,
        *,
        resync: bool = False,
    ) -> None:
        self.diverged = False
        self._resync = resync
        self.selection = selection
        self.party = party
        self.backend = backend
        self._source = source or selection.parameters.__getitem__
        self.buckets = buckets_for(selection, codec, fragments)
        self.digests: list[int] = []
        self.refresh_digests()
        self._protection = protection
        self._codec = codec
        self._encoder = backend.encoder(codec)
        self._states = [backend.remember(codec.init(bucket.layout)) for bucket in self.buckets]
        self._payloads: dict[int, bytes] = {}  # of this round, encoded with a change of state, so only once
        self._final_payloads: dict[int, bytes] = {}

    # The parameters

    def flat(self, parts: Sequence[int] | None = None) -> Flat:
        """Zeros for these buckets; by default for all."""
        parts = range(len(self.buckets)) if parts is None else parts
        return self.backend.flat([self.buckets[part].numel for part in parts])

    def read(self, bucket: Bucket) -> Vector:
        """The present values of the parameters in a bucket, as a fresh vector."""
        return self.backend.gather(bucket, self._source)

    def refresh_digests(self) -> None:
        """Hash the parameters anew."""
        self.digests = [self.backend.digest(self.read(bucket)) for bucket in self.buckets]

    def parameter_digest(self) -> str:
        """One hash of all selected parameters, from the buckets' digests."""
        return f"{checksum(struct.pack(f'!{len(self.digests)}Q', *self.digests)):016x}"

    # A round

    def open(self, number: int, opening: Opening, when: str, *, meets: bool = True) -> dict[str, Opening]:
        """Exchange the openings of a round and check that all members hold the same parameters.

        Args:
            number: exchange number.
            opening: this member's; the result has everybody's.
            when: a few words for an error, such as "after round 6".
            meets: whether this member would take in a cluster that has come back.

        Raises:
            NebulaError: naming the first differing bucket and its parameters.
        """
        link = self.party.link
        opening = replace(opening, guests=guest_bits(self.party.candidates() if meets else (), link.clusters))
        flags = FINAL if opening.final else 0
        link.post(Kind.ROUND, opening.pack(), round=number, flags=flags)
        openings = {}
        for member in link.members:
            if member == link.cluster:
                openings[member] = opening
                continue
            with link.receive(member, Kind.ROUND, round=number) as message:
                openings[member] = Opening.parse(
                    bytes(message.payload),
                    message.frame.flags,
                    member=member,
                    buckets=len(self.buckets),
                    present_bytes=len(opening.present),
                )
        self._compare(openings, when)
        return openings

    def average(
        self,
        number: int,
        share: Mapping[str, np.float32],
        parts: Sequence[int],
        produce: Callable[[Bucket], Vector],
        when_posted: Callable[[], None] = lambda: None,
        final: Codec | None = None,
    ) -> Flat:
        """The weighted sum over all members of what they produce, decoded.

        Args:
            number: exchange number; with the same number it may be called again, see `Party.together`.
            share: member -> its weight; they sum to 1.
            parts: which buckets, in order, the same on all members.
            produce: this member's vector for a bucket, fresh and all finite.
            when_posted: see `all_gather`.
            final: encode with this codec, which has no state, everything that has not been sent so far.

        Returns:
            The averages of the buckets ``parts``, one after the other.

        Raises:
            PeerLost: a peer's payload does not decode.
            NebulaError: a value does not fit into the codec's wire format.
        """
        starts, values, encoder = self._starts(parts), self.flat(parts), self._encoder_for(final)
        buckets = [self.buckets[part] for part in parts]
        produce = self._protection.bound(buckets, produce, share)
        if (secure := self._protection.secure) is not None and parts:
            secure.average(self.party.link, number, share, buckets, produce, when_posted, self.backend.to_host(values))
            return values
        for index, member, payload in self._payloads_of(number, parts, produce, when_posted, final):
            bucket = self.buckets[parts[index]]
            part = values[starts[index] : starts[index + 1]]
            with _blaming(member, bucket):
                encoder.add(payload, bucket.layout, share[member], part)
                self._check_finite(part)
        return values

    def collect(
        self,
        number: int,
        parts: Sequence[int],
        produce: Callable[[Bucket], Vector],
        final: Codec | None = None,
    ) -> dict[str, Flat]:
        """What each member produces, decoded, this one included, as `average` would weigh and add it; see there."""
        starts, encoder = self._starts(parts), self._encoder_for(final)
        values = {member: self.flat(parts) for member in self.party.link.members}
        for index, member, payload in self._payloads_of(number, parts, produce, lambda: None, final):
            bucket = self.buckets[parts[index]]
            with _blaming(member, bucket):
                decoded = self.backend.decode(encoder, payload, bucket.layout)
                self._check_finite(decoded)
            self.backend.assign(values[member][starts[index] : starts[index + 1]], decoded)
        return values

    def commit(self, *, void: bool = False) -> None:
        """The round is complete: forget what it sent; ``void``: nobody uses it, so feedback takes it back."""
        if void:
            for part, payload in self._payloads.items():
                self._encoder.take_back(memoryview(payload), self.buckets[part].layout, self._states[part])
        self._payloads.clear()
        self._final_payloads.clear()

    def unsent(self, part: int) -> Vector | None:
        """What was to be sent of a bucket and was not, if the codec keeps it; may be changed in place."""
        return self._encoder.unsent(self._states[part])

    # Checkpoints

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """The codec's state, for a checkpoint: "codec/BUCKET/NAME" -> array, and "codec/spec" -> its spec's bytes."""
        arrays: dict[str, npt.NDArray[np.generic]] = {
            f"codec/{part}/{name}": array
            for part, state in enumerate(self._states)
            for name, array in self.backend.recall(state).items()
        }
        return {**arrays, _SPEC: np.frombuffer(self._codec.spec.encode(), dtype=np.uint8)} if arrays else {}

    def restore(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Continue from a checkpoint's state.

        Raises:
            NebulaError: it belongs to another codec or another selection.
        """
        if _SPEC in arrays and (spec := arrays[_SPEC].tobytes().decode(errors="replace")) != self._codec.spec:
            raise NebulaError(
                f"the checkpoint must hold what sync_codec={self._codec.spec!r} has not sent, got that of {spec!r}: resume "
                "with the codec that it was written with"
            )
        wanted, found = (
            {name: a for name, a in all_of.items() if _KEY.fullmatch(name)} for all_of in (self.state(), arrays)
        )
        if described(wanted) != described(found):
            odd = next(name for name in [*wanted, *found] if described(wanted).get(name) != described(found).get(name))
            raise NebulaError(
                f"the checkpoint's state of sync_codec={self._codec.spec!r} must hold {odd} as "
                f"{described(wanted).get(odd, 'nothing')}, got {described(found).get(odd, 'nothing')}: resume with the "
                "codec, error feedback and parameters that it was written with"
            )
        states: list[State] = [{} for _ in self.buckets]
        for name, array in found.items():
            match = _KEY.fullmatch(name)
            assert match is not None
            states[int(match[1])][match[2]] = np.array(array)
        # In the order of init(), which a codec may rely on.
        self._states = [
            self.backend.remember({name: states[part][name] for name in state})
            for part, state in enumerate(self._states)
        ]

    # Inside

    def _starts(self, parts: Sequence[int]) -> list[int]:
        """Where each of the buckets begins if they are put one after the other, and where the last one ends."""
        return [0, *accumulate(self.buckets[part].numel for part in parts)]

    def _encoder_for(self, final: Codec | None) -> Encoder:
        return self._encoder if final is None else self.backend.encoder(final)

    def _payloads_of(
        self,
        number: int,
        parts: Sequence[int],
        produce: Callable[[Bucket], Vector],
        when_posted: Callable[[], None],
        final: Codec | None,
    ) -> Iterator[tuple[int, str, memoryview]]:
        member_index = self.party.link.clusters.index(self.party.link.cluster)

        def encode(index: int) -> memoryview:
            bucket, turn = self.buckets[parts[index]], Turn(number, parts[index], member_index)
            if final is not None:
                return self._encode_all(final, bucket, produce, turn)
            return self._encode_once(bucket, produce, turn)

        return all_gather(self.party.link, Kind.BUCKET, number, len(parts), encode, when_posted)

    def _encode_once(self, bucket: Bucket, produce: Callable[[Bucket], Vector], turn: Turn) -> memoryview:
        """This member's payload; if encoding changes state, a repeated round sends the same one again."""
        state = self._states[bucket.index]
        if not state:
            return self._encode(None, produce(bucket), bucket, state, turn)
        if bucket.index not in self._payloads:
            self._payloads[bucket.index] = bytes(self._encode(None, produce(bucket), bucket, state, turn))
        return memoryview(self._payloads[bucket.index])

    def _encode_all(self, final: Codec, bucket: Bucket, produce: Callable[[Bucket], Vector], turn: Turn) -> memoryview:
        """This member's payload in the last round: also what was not sent before."""
        part = bucket.index
        if part not in self._final_payloads:
            unsent = self.unsent(part)
            if (sent := self._payloads.pop(part, None)) is not None and unsent is not None:
                # The round was begun as any other, and is repeated as the last: the change is in the state by now.
                self._encoder.take_back(memoryview(sent), bucket.layout, self._states[part])
                vector = self.backend.copy(unsent)
            else:
                vector = produce(bucket)
                if unsent is not None:
                    self.backend.add(vector, unsent)
            self._final_payloads[part] = bytes(self._encode(final, vector, bucket, {}, turn))
        return memoryview(self._final_payloads[part])

    def _encode(self, final: Codec | None, vector: Vector, bucket: Bucket, state: Remembered, turn: Turn) -> memoryview:
        try:
            return self._encoder_for(final).encode(vector, bucket.layout, state, turn)
        except OverflowError as error:
            names = ", ".join(dict.fromkeys(self.selection.names[piece[0]] for piece in bucket.pieces))
            raise NebulaError(
                f"a value does not fit into sync_codec={(final or self._codec).spec!r} in round {turn.round} (in {names[:200]}): {error}"
            ) from None

    def _check_finite(self, vector: Vector) -> None:
        if not self.backend.finite(vector):  # nobody sends that who is not broken or hostile, and all see it alike
            raise ProtocolError("it must hold finite numbers, got infinite ones or NaN")

    def _compare(self, openings: Mapping[str, Opening], when: str) -> None:
        if (bucket := first_difference([opening.digests for opening in openings.values()])) is None:
            return
        cluster = self.party.link.cluster
        odd = next(member for member, theirs in openings.items() if theirs.digests[bucket] != self.digests[bucket])
        names = [self.selection.names[piece[0]] for piece in self.buckets[bucket].pieces]
        sentence = (
            f"clusters {cluster!r} and {odd!r} must hold identical parameters {when}, but bucket {bucket} of "
            f"{len(self.digests)} differs ({names[0]} ... {names[-1]}): unlike hardware rounds differently, the optimizers "
            "differ (a custom one, or another checkpoint's state), or something changed parameters on one side only"
        )
        if not self._resync or (right := majority({name: theirs.digests for name, theirs in openings.items()})) is None:
            raise NebulaError(sentence)
        self.diverged = cluster not in right
        # Who is wrong goes alone, not with others that are wrong in another way.
        wrong = [cluster] if self.diverged else [name for name in openings if name not in right]
        raise PeerLost(wrong[0], sentence, also=[PeerLost(name, sentence) for name in wrong[1:]])


@contextmanager
def _blaming(member: str, bucket: Bucket) -> Iterator[None]:
    """Whoever sent what does not decode is no member any more."""
    try:
        yield
    except ProtocolError as error:
        raise PeerLost(member, f"its bucket {bucket.index} does not decode: {error}") from error


def buckets_for(selection: Selection, codec: Codec, fragments: int = 1) -> list[Bucket]:
    """The selection, cut in the same way on every process of every cluster.

    Args:
        selection: the parameters.
        codec: may want whole tensors.
        fragments: so many buckets at least; if more than one, none cuts a parameter in two.

    Raises:
        ConfigurationError: there are too few parameters for so many fragments, or nothing for the codec to compress.
    """
    if fragments == 1:
        buckets = cut(selection, whole_tensors=codec.whole_tensors)
    else:
        buckets = cut(
            selection, bucket_numel=min(BUCKET_NUMEL, max(1, selection.numel // fragments)), whole_tensors=True
        )
    if len(buckets) < fragments:
        raise ConfigurationError(
            [
                f"sync_fragments must be at most {len(buckets)}, the number of parts that {len(selection)} parameters of "
                f"these sizes make if none is cut, got {fragments}"
            ]
        )
    if not any(codec.compresses(bucket.layout) for bucket in buckets):
        raise ConfigurationError(
            [
                f"sync_codec={codec.spec!r} would compress nothing: none of the {len(selection)} parameters that travel is "
                f"a matrix large enough ({selection.names[0]}, ...): use another codec"
            ]
        )
    return buckets


def name_fault(exchange: Exchange, bucket: Bucket, vector: Vector, what: str, where: str) -> NebulaError | None:
    """The error for a vector that is not finite, naming the parameter; None if it is finite.

    Args:
        exchange: knows the parameters.
        bucket: where the vector belongs.
        vector: shape (bucket.numel,).
        what: "gradient" or "change".
        where: "at step 7".
    """
    if exchange.backend.finite(vector):
        return None
    values, at = exchange.backend.to_host(vector), 0
    for index, start, stop in bucket.pieces:
        piece = values[at : at + stop - start]
        at += stop - start
        if bad := int((~np.isfinite(piece)).sum()):
            return NebulaError(
                f"the {what} of {exchange.selection.names[index]!r} must be finite, got {bad} infinite or NaN of "
                f"{len(piece)} elements {where}: lower the learning rate or look at the data of this step"
            )
    raise AssertionError("a bucket that is not finite has an element that is not")
