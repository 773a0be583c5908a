"""A cluster comes back: it gets what the others have, and what it has done meanwhile is not lost.

A parting is no loss of work. Both sides went on from common parameters; what each has trained on since then is its
weight, and the new parameters are the weighted average of both sides' present ones. That is one round of
``local_steps`` over the time of the parting: with shares that sum to one, common + sum of share x change is the average
of the parameters themselves, so nobody needs the common ones any more, and all of it is sent in float32.

If the two remember no common round, or too long ago, the newcomer's own work is dropped, and counted; then only the
host with the shortest way to it sends anything, and only the buckets that differ.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import HandshakeError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather_notes, pass_on
from paddlenlp_nebula.link.handshake import compare
from paddlenlp_nebula.link.link import EpochProposed, Link
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.history import History, last_common, since
from paddlenlp_nebula.strategy.introduction import Introduction

__all__ = ["Bearings", "Member", "Plane", "Reunion", "Reunited"]

_CHOICE = 1  # part of a REUNION message
_LAST_WORD_S = 5.0


@dataclass(frozen=True)
class Plane:
    """Numbers that a newcomer gets: the selected parameters, or a state that belongs to them.

    Attributes:
        buckets: how they are cut, the same on all clusters.
        read: a bucket's present numbers, float32 of shape (numel,), in host memory.
    """

    buckets: Sequence[Bucket]
    read: Callable[[Bucket], Float32Vector]

    @property
    def numel(self) -> int:
        """All of its numbers."""
        return self.buckets[-1].stop if self.buckets else 0


@dataclass(frozen=True, slots=True)
class Bearings:
    """Where a cluster stands.

    Attributes:
        step: optimizer steps taken.
        turns: rounds merged, which fragment is next.
        fields: what must be equal on all clusters, see `handshake.compare`.
        diverged: what it brings is known to be wrong.
    """

    step: int
    turns: int
    fields: Mapping[str, Any]
    diverged: bool = False


@dataclass(frozen=True)
class Reunited:
    """The outcome, on every member.

    Attributes:
        newcomer: who has come back.
        members: all members.
        step, turns: where everybody stands from now on.
        share: the newcomer's part of the new parameters.
        work: samples or tokens (as ``sync_weight`` says) that the newcomer has trained on since the parting.
        common: the last round that both sides have been through; None if they remember none.
        apart: rounds that have been done without each other since.
        diverged: the newcomer was lost because its parameters were wrong.
        parameters: the new values of all selected parameters; None where they stay as they are.
        states: the newcomer's further planes; empty on others.
    """

    newcomer: str
    members: tuple[str, ...]
    step: int
    turns: int
    share: float
    work: float
    common: int | None
    apart: int
    diverged: bool
    parameters: Float32Vector | None
    states: list[Float32Vector] = field(default_factory=list)


class Member(Protocol):
    """A strategy, as far as a reunion is concerned.

    Attributes:
        exchange: of which the buckets and digests matter here.
    """

    exchange: Exchange

    @property
    def turns(self) -> int:
        """Rounds that have been merged."""

    def settle(self) -> None:
        """This cluster has been alone: what it holds now is what it brings."""

    def brings(self, bucket: Bucket) -> Float32Vector:
        """Its selected parameters in a bucket, in host memory, which all members of its group hold."""

    def planes(self) -> list[Plane]:
        """What a newcomer's leader takes over besides the parameters."""

    def move(self, parameters: Float32Vector, turns: int, states: Sequence[Float32Vector]) -> Float32Vector:
        """Go on from new parameters, shape (selection.numel,), which may be overwritten; returns where its own steps begin."""


class Reunion:
    """Takes one newcomer in, on a leader; an exchange like any other, so `Party.together` repeats it after a loss.

    Args:
        link: to the members, the newcomer included.
        history: this cluster's.
        staleness_limit: rounds of the hosts after which a newcomer's own work is dropped; 0: always.
    """

    def __init__(self, link: Link, history: History, staleness_limit: int) -> None:
        self._link = link
        self._history = history
        self._limit = staleness_limit
        self._fetched: dict[int, tuple[int, Float32Vector]] = {}  # bucket -> digest and values, of a broken attempt
        self._accepted = False  # the newcomer has said yes

    def attempt(
        self,
        number: int,
        newcomer: str,
        bearings: Bearings,
        parameters: Plane,
        states: Sequence[Plane] = (),
        patience_s: float | None = None,
    ) -> Reunited | None:
        """Come together.

        Args:
            number: of the exchange.
            newcomer: who comes back; this cluster, perhaps.
            bearings: this cluster's.
            parameters: the selected ones; all hosts hold the same.
            states: what else a newcomer takes over.
            patience_s: how long it may take to answer the invitation; None: as long as the link waits for anything.

        Returns:
            None if the newcomer is gone again, or nobody is left who has taken it in.

        Raises:
            PeerLost: a member is lost, or the newcomer does not train the same thing.
            HandshakeError: this cluster is the newcomer, and does not train the same thing.
        """
        link = self._link
        if newcomer not in link.members or len(link.members) == 1:
            return None
        joins = newcomer == link.cluster
        hosts = [member for member in link.members if member != newcomer]
        if not joins and not self._accepted:
            self._await_acceptance(newcomer, patience_s)
        notes = self._introductions(number, bearings)
        self._compare(notes, newcomer, hosts[0])
        self._check_steps(notes, bearings)
        share, work, common, apart = self._shares(notes, newcomer, hosts)
        donor = self._donor(number, newcomer, hosts)
        fetches = joins and not share
        own = [self._digest_of(bucket, parameters, fetches=fetches) for bucket in parameters.buckets]
        theirs = self._other_digests(number, newcomer, hosts, donor, own)
        parts = [index for index, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1]]
        routes: dict[str, Sequence[str]] = {donor: [newcomer]}
        if share:
            routes[newcomer] = hosts
        values = None
        if joins or share:
            weights = (share, np.float32(1) - share)
            weights = weights if joins else weights[::-1]
            values = self._average(number, parameters, parts, theirs, routes, weights, fetches=fetches)
        else:
            deque(self._parts(number, parameters, parts, routes), maxlen=0)  # this one may have to send
        received = [self._copy(number, state, {donor: [newcomer]}, joins) for state in states]
        return Reunited(
            newcomer=newcomer,
            members=link.members,
            # Of all: who went back would run out of data before the end.
            step=max(note.step for note in notes.values()),
            turns=notes[hosts[0]].turns,
            share=float(share),
            work=work,
            common=common,
            apart=apart,
            diverged=notes[newcomer].diverged,
            parameters=values,
            states=received if joins else [],
        )

    def done(self, *, complete: bool) -> None:
        """The reunion is complete, or given up until the next time."""
        self._accepted = False
        if complete:
            self._fetched.clear()

    def _await_acceptance(self, newcomer: str, patience_s: float | None) -> None:
        try:
            with self._link.receive(newcomer, Kind.ACCEPT, timeout_s=patience_s):
                self._accepted = True
        except (PeerLost, EpochProposed):
            raise
        except NebulaError as error:  # another message than ACCEPT
            raise PeerLost(newcomer, "it was in another group by then, or invites us itself: both try again") from error

    def _introductions(self, number: int, bearings: Bearings) -> dict[str, Introduction]:
        work, history = self._history.work, self._history.entries()
        own = Introduction(bearings.step, bearings.turns, bearings.fields, work, history, bearings.diverged)
        notes = all_gather_notes(self._link, own.note(), round=number, kind=Kind.REUNION)
        found = {}
        for member, note in notes.items():
            try:
                found[member] = Introduction.parse(note, f"cluster {member!r}")
            except ProtocolError as error:
                raise PeerLost(member, str(error)) from error
        return found

    def _compare(self, notes: Mapping[str, Introduction], newcomer: str, host: str) -> None:
        if not (problems := compare({name: notes[name].fields for name in (host, newcomer)})):
            return
        sentence = "it does not train the same thing: " + "; ".join(problems)
        if newcomer == self._link.cluster:
            raise HandshakeError(f"cluster {newcomer!r} cannot come back: {sentence}")
        self._link.deliver(newcomer, _LAST_WORD_S)  # our note, from which it concludes the same
        raise PeerLost(newcomer, sentence)

    def _check_steps(self, notes: Mapping[str, Introduction], bearings: Bearings) -> None:
        """Nobody is taken beyond the end, whatever a host says is planned: only the first one's plan is compared."""
        planned = bearings.fields.get("max_steps")
        for member, note in notes.items():
            if isinstance(planned, int) and note.step > planned:
                raise PeerLost(member, f"it must stand at a step of {planned} (max_steps) at most, got {note.step}")

    def _shares(
        self, notes: Mapping[str, Introduction], newcomer: str, hosts: Sequence[str]
    ) -> tuple[np.float32, float, int | None, int]:
        """The newcomer's share, its work since the last common round, that round, and how many there have been since."""
        theirs = notes[newcomer]
        common = [last_common(notes[host].history, theirs.history) for host in hosts]
        number = max((number for number in common if number is not None), default=None)
        if number is None:
            return np.float32(0), theirs.work, None, 0
        latest = max(entry.number for name in notes for entry in notes[name].history)
        work = {name: since(note.history, note.work, number) for name, note in notes.items()}
        total = sum(work.values())
        merges = latest - number <= self._limit > 0 and total > 0 and not theirs.diverged
        share = np.float32(work[newcomer] / total if merges else 0)
        return share, work[newcomer], number, latest - number

    def _donor(self, number: int, newcomer: str, hosts: Sequence[str]) -> str:
        """The host that sends, chosen by the newcomer: the one with the shortest way to it."""
        link = self._link
        if link.cluster != newcomer:
            with link.receive(newcomer, Kind.REUNION, round=number, part=_CHOICE) as message:
                donor = parse_note(message.payload, "REUNION", f"cluster {newcomer!r}").get("donor")
                if donor not in hosts:
                    raise ProtocolError(f"cluster {newcomer!r} must choose a host, got {donor!r:.80}")
            return str(donor)
        link.measure_rtt(1)
        donor = min(hosts, key=lambda host: link.rtt_s.get(host, float("inf")))
        link.post(Kind.REUNION, pack_note({"donor": donor}), round=number, part=_CHOICE)
        return donor

    def _other_digests(
        self, number: int, newcomer: str, hosts: Sequence[str], donor: str, own: Sequence[int]
    ) -> tuple[int, ...]:
        """The hashes of the buckets that the other side has."""
        link = self._link
        joins = link.cluster == newcomer
        if joins or link.cluster == donor:
            packed = struct.pack(f"!{len(own)}Q", *own)
            link.post(Kind.DIGESTS, packed, round=number, to=hosts if joins else [newcomer])
            link.flush()
        with link.receive(donor if joins else newcomer, Kind.DIGESTS, round=number) as message:
            if message.frame.length != 8 * len(own):
                raise ProtocolError(f"{len(own)} hashes must be {8 * len(own)} bytes, got {message.frame.length}")
            return struct.unpack(f"!{len(own)}Q", message.payload)

    def _digest_of(self, bucket: Bucket, plane: Plane, *, fetches: bool) -> int:
        """Of what this side has of a bucket; what a broken attempt has brought need not be sent again."""
        if fetches and bucket.index in self._fetched:
            return self._fetched[bucket.index][0]
        return HOST.digest(plane.read(bucket))

    def _average(
        self,
        number: int,
        plane: Plane,
        parts: Sequence[int],
        digests: Sequence[int],
        routes: Mapping[str, Sequence[str]],
        weights: tuple[np.float32, np.float32],
        *,
        fetches: bool,
    ) -> Float32Vector:
        """Our numbers by the first weight and theirs by the second; theirs as they are if ours have no weight.

        All members get the same bits: both sides round the same two products, and the sum of two numbers does not
        depend on their order.
        """
        weight, other = weights
        values = np.empty(plane.numel, dtype=np.float32)
        for bucket in plane.buckets:
            kept = self._fetched.get(bucket.index) if fetches else None
            values[bucket.start : bucket.stop] = plane.read(bucket) if kept is None else kept[1]
        for part, member, theirs in self._parts(number, plane, parts, routes):
            bucket = plane.buckets[part]
            if HOST.digest(theirs) != digests[part]:
                raise PeerLost(member, f"its bucket {part} is not the one that it has announced")
            ours = values[bucket.start : bucket.stop]
            if not weight:
                ours[:] = theirs
                if fetches:  # only then is it announced as what we have, should this attempt break
                    self._fetched[part] = (digests[part], ours)
            elif other:  # else not even their zeros, which would turn a -0.0 into another one than that of the others
                ours *= weight
                ours += other * theirs
        return values

    def _copy(self, number: int, plane: Plane, routes: Mapping[str, Sequence[str]], joins: bool) -> Float32Vector:
        """The donor's numbers, on the newcomer."""
        values = np.empty(plane.numel if joins else 0, dtype=np.float32)
        for part, _, theirs in self._parts(number, plane, range(len(plane.buckets)), routes):
            values[plane.buckets[part].start : plane.buckets[part].stop] = theirs
        return values

    def _parts(
        self, number: int, plane: Plane, parts: Sequence[int], routes: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[int, str, Float32Vector]]:
        """Send and receive buckets; yields those that arrive, and from whom."""

        def produce(part: int) -> memoryview:
            return np.ascontiguousarray(plane.read(plane.buckets[part]), dtype="<f4").data.cast("B")

        for part, member, payload in pass_on(self._link, Kind.PARAMETERS, number, parts, produce, routes):
            wanted = 4 * plane.buckets[part].numel
            if len(payload) != wanted:
                raise PeerLost(member, f"its bucket {part} must be {wanted} bytes, got {len(payload)}")
            theirs = np.frombuffer(payload, dtype="<f4")
            if not HOST.finite(theirs):
                raise PeerLost(member, f"its bucket {part} must hold finite numbers, got infinite ones or NaN")
            yield part, member, theirs
