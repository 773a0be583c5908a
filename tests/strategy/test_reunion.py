"""A cluster comes back: what everybody ends with, against plain numpy, whoever is lost on the way or does not play fair."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Layout
from paddlenlp_nebula.errors import HandshakeError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import HEADER_BYTES, Kind
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.strategy.history import Entry, History
from paddlenlp_nebula.strategy.introduction import Introduction
from paddlenlp_nebula.strategy.reunion import Bearings, Plane, Reunion, Reunited

from ..link.clusters import NAMES, at_once, meet
from ..link.test_membership import MANNERS, Death, dies_at

SIZES = (7, 7, 7, 3)
NUMEL = sum(SIZES)
EPOCH = 5
COMMON = 10  # the last round that all have been through
FIELDS = {"selection": "abc", "max_steps": 100}

pytestmark = pytest.mark.timeout(120)


def buckets(sizes: Sequence[int] = SIZES) -> list[Bucket]:
    starts = [0, *itertools.accumulate(sizes)]
    return [Bucket(i, starts[i], starts[i + 1], ((i, 0, size),), Layout.flat(size)) for i, size in enumerate(sizes)]


def plane(vector: Any, sizes: Sequence[int] = SIZES) -> Plane:
    return Plane(buckets(sizes), lambda bucket: vector[bucket.start : bucket.stop].copy())


def numbers(seed: int, numel: int = NUMEL) -> Any:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def history_of(work: float, *, apart: int = 0, prefix: str = "host", common: int = COMMON, joined: int = 1) -> History:
    """Rounds with everybody up to ``common``, then ``apart`` of another group, in which ``work`` was done in all."""
    history = History()
    for number in range(joined, common + 1):
        history.work += 100
        history.note(number, f"d{number}", NAMES)
    for number in range(max(common + 1, joined), common + apart + 1):
        history.note(number, f"{prefix}{number}", NAMES[:2])
    history.work += work
    return history


class Side:
    """A cluster in a reunion."""

    def __init__(
        self,
        link: Link,
        newcomer: str,
        parameters: Any,
        history: History,
        *,
        states: Sequence[Any] = (),
        fields: Mapping[str, Any] = FIELDS,
        step: int = 50,
        turns: int = 3,
        limit: int = 64,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self.link, self.newcomer = link, newcomer
        self.bearings = Bearings(step, turns, fields)
        self.parameters = plane(parameters, sizes)
        self.states = [plane(state) for state in states]
        self.events: list[str] = []
        self.party = Party(link, on_loss="continue", quorum=1, report=self.events.append, number=COMMON)
        self.reunion = Reunion(link, history, limit)

    def reunite(self) -> Reunited | None:
        if self.link.cluster == self.newcomer:
            self.link.post(Kind.ACCEPT, pack_note({}))
        attempt = functools.partial(
            self.reunion.attempt,
            newcomer=self.newcomer,
            bearings=self.bearings,
            parameters=self.parameters,
            states=self.states,
        )
        found = self.party.together(lambda number: attempt(number))
        self.reunion.done(complete=found is not None)
        return found

    def goes_on(self) -> tuple[str, ...]:
        """The next exchange; who takes part."""
        return tuple(self.party.together(lambda number: all_gather_notes(self.link, {}, round=number)))


def linked(members: int, **more: Any) -> dict[str, Link]:
    """All members as after an invitation."""
    links = meet(*NAMES[:members], **more)
    for link in links.values():
        link.admit(link.members, EPOCH)
    return links


def sides(
    members: int, newcomer: str, works: Sequence[float], links: Mapping[str, Link] | None = None, **more: Any
) -> dict[str, Side]:
    """The hosts hold the same numbers, the newcomer others, and each has done its work since the parting."""
    found = {}
    for name, link, work in zip(NAMES, (links or linked(members)).values(), works, strict=False):
        joins = name == newcomer
        own = {
            "parameters": numbers(1 if joins else 0),
            "history": history_of(work, apart=0 if joins else 4),
            "states": [numbers(11 if joins else 10), numbers(21 if joins else 20)],
            "step": 70 if joins else 50,
            "turns": 9 if joins else 3,
        }
        own |= {key: value(joins) if callable(value) else value for key, value in more.items()}
        found[name] = Side(link, newcomer, **own)
    return found


def all_reunite(group: Mapping[str, Side]) -> dict[str, Any]:
    return at_once({name: side.reunite for name, side in group.items()}, timeout_s=60)


def fetched(side: Side) -> int:
    return side.link.bytes_received["PARAMETERS"]


def wire_bytes(*numels: int) -> int:
    return sum(HEADER_BYTES + 4 * numel for numel in numels)


# What everybody ends with


@pytest.mark.parametrize(
    ("newcomer", "works"),
    [
        ("amber", (30.0, 10.0)),
        ("birch", (30.0, 10.0)),
        ("birch", (3.0, 0.0, 5.0)),
        ("cedar", (3.0, 7.0, 5.0)),
        ("amber", (1e9, 1.0, 1.0)),
        ("amber", (1.0, 1e3, 1e3)),
        ("delta", (1.0, 2.0, 3.0, 4.0)),
        ("birch", (1.0, 2.0, 3.0, 4.0)),
    ],
)
def test_both_sides_work_counts(newcomer: str, works: tuple[float, ...]) -> None:
    group = sides(len(works), newcomer, works)
    outcomes = all_reunite(group)
    names = NAMES[: len(works)]
    work = works[names.index(newcomer)]
    share = np.float32(work / sum(works))
    expected = share * numbers(1) + (np.float32(1) - share) * numbers(0) if share else numbers(0)
    for name, found in outcomes.items():
        assert isinstance(found, Reunited), found
        assert (found.newcomer, found.members) == (newcomer, names)
        assert (found.share, found.work, found.common, found.apart) == (float(share), work, COMMON, 4)
        assert (found.step, found.turns) == (70, 3)
        assert (group[name].link.members, group[name].link.epoch) == (names, EPOCH)
        if found.parameters is None:
            assert not share
            assert name != newcomer
        else:
            assert found.parameters.tobytes() == expected.astype(np.float32).tobytes()
        wanted = [numbers(10), numbers(20)] if name == newcomer else []
        assert [state.tobytes() for state in found.states] == [state.tobytes() for state in wanted]
    assert at_once({name: side.goes_on for name, side in group.items()}) == dict.fromkeys(names, names)


def test_the_average_is_that_of_numpy_in_float64() -> None:
    group = sides(3, "cedar", (20.0, 30.0, 50.0))
    found = all_reunite(group)["amber"]
    np.testing.assert_allclose(
        found.parameters, 0.5 * numbers(1).astype(np.float64) + 0.5 * numbers(0), rtol=1e-6, atol=1e-7
    )


def test_zeros_have_the_same_sign_everywhere() -> None:
    """A share of one: nothing of the hosts' is added on the newcomer, not even zeros."""
    zeros, ones = -np.zeros(NUMEL, np.float32), np.ones(NUMEL, np.float32)
    group = sides(3, "birch", (0.0, 5.0, 0.0), parameters=lambda joins: zeros if joins else ones)
    outcomes = all_reunite(group)
    assert {found.parameters.tobytes() for found in outcomes.values()} == {zeros.tobytes()}


def test_nobody_has_done_anything() -> None:
    outcomes = all_reunite(sides(2, "birch", (0.0, 0.0)))
    assert outcomes["birch"].share == 0
    assert outcomes["birch"].parameters.tobytes() == numbers(0).tobytes()


@pytest.mark.parametrize(
    ("apart", "limit", "merges"), [(4, 4, True), (5, 4, False), (0, 1, True), (0, 0, False), (1, 0, False)]
)
def test_staleness(apart: int, limit: int, merges: bool) -> None:
    def history(joins: bool) -> History:
        return history_of(10.0, apart=0 if joins else apart)

    outcomes = all_reunite(sides(3, "cedar", (0.0, 0.0, 0.0), history=history, limit=limit))
    for name, found in outcomes.items():
        assert (found.share > 0) is merges, name
        assert (found.work, found.common, found.apart) == (10.0, COMMON, apart)
        assert (found.step, found.turns) == (70, 3)
    assert (outcomes["amber"].parameters is not None) is merges
    if not merges:
        assert outcomes["cedar"].parameters.tobytes() == numbers(0).tobytes()


def test_rounds_of_the_newcomers_own_group_count_as_apart() -> None:
    def history(joins: bool) -> History:
        return history_of(10.0, apart=9 if joins else 2, prefix="guest" if joins else "host")

    outcomes = all_reunite(sides(2, "birch", (0.0, 0.0), history=history, limit=8))
    assert [found.apart for found in outcomes.values()] == [9, 9]
    assert [found.share for found in outcomes.values()] == [0, 0]


@pytest.mark.parametrize("remembers", ["nothing", "another run"])
def test_without_a_common_round_the_newcomers_work_is_dropped(remembers: str) -> None:
    def history(joins: bool) -> History:
        if not joins:
            return history_of(10.0, apart=2)
        if remembers == "nothing":
            return History()
        other = History()
        other.work = 77.0
        other.note(COMMON, "other", NAMES)
        return other

    outcomes = all_reunite(sides(3, "amber", (0.0, 0.0, 0.0), history=history))
    for found in outcomes.values():
        assert (found.share, found.common, found.apart) == (0, None, 0)
        assert found.work == (0.0 if remembers == "nothing" else 77.0)
        assert found.step == 70
    assert outcomes["amber"].parameters.tobytes() == numbers(0).tobytes()
    assert outcomes["birch"].parameters is outcomes["cedar"].parameters is None


def test_a_host_that_joined_later_counts_from_then_on() -> None:
    """It remembers no round that the newcomer does; the other host does."""
    group = sides(3, "cedar", (30.0, 20.0, 50.0))
    late = History()
    late.work = 12345.0
    for number in range(COMMON + 3, COMMON + 5):
        late.note(number, f"host{number}", NAMES[:2])
    late.work += 20.0
    group["birch"].reunion._history = late
    for found in all_reunite(group).values():
        assert (found.share, found.common) == (float(np.float32(0.5)), COMMON)


# What travels


@pytest.mark.parametrize("equal", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_only_what_differs_travels(equal: tuple[int, ...]) -> None:
    mine = numbers(0)
    for bucket in buckets():
        if bucket.index not in equal:
            mine[bucket.start : bucket.stop] = numbers(1)[bucket.start : bucket.stop]
    differing = wire_bytes(*(size for index, size in enumerate(SIZES) if index not in equal))
    states = 2 * wire_bytes(*SIZES)
    for works, merges in (((5.0, 5.0, 10.0), True), ((5.0, 5.0, 0.0), False)):
        group = sides(3, "cedar", works, parameters=lambda joins: mine if joins else numbers(0))
        group["cedar"].link.rtt_s["birch"] = 0.0  # the shortest way
        outcomes = all_reunite(group)
        assert fetched(group["cedar"]) == differing + states
        assert group["birch"].link.bytes_sent["PARAMETERS"] == differing + states
        assert group["amber"].link.bytes_sent["PARAMETERS"] == 0
        for host in ("amber", "birch"):
            assert fetched(group[host]) == (differing if merges else 0)
        expected = numbers(0)
        if merges:
            half = np.float32(0.5)
            for bucket in (bucket for bucket in buckets() if bucket.index not in equal):
                place = slice(bucket.start, bucket.stop)
                expected[place] = half * expected[place] + half * mine[place]
        assert outcomes["cedar"].parameters.tobytes() == expected.tobytes()


def test_long_buckets_through_narrow_channels() -> None:
    """Nothing fits into a channel at once, and both sides send."""
    sizes = (5000, 5000, 5000, 1)
    links = linked(3, chunk_bytes=1024, chunks=2)
    vectors = {joins: numbers(joins, sum(sizes)) for joins in (True, False)}
    group = sides(3, "birch", (1.0, 2.0, 1.0), links, parameters=vectors.__getitem__, sizes=sizes)
    half = np.float32(0.5)
    for found in all_reunite(group).values():
        assert found.parameters.tobytes() == (half * vectors[True] + half * vectors[False]).tobytes()


# Somebody is lost on the way


class Lost(NamedTuple):
    """What a victim has left behind."""

    group: dict[str, Side]
    found: dict[str, Reunited | None]  # by survivor
    late: bool  # the victim had done all its part


def lose(victim: str, newcomer: str, works: Sequence[float], action: int, manner: str = "killed", **more: Any) -> Lost:
    """A reunion in which one dies just before its ``action``-th message, or right after, and the others go on."""
    group = sides(len(works), newcomer, works, **more)
    dies_at(group[victim].link, action, MANNERS[manner])

    def act(side: Side) -> tuple[Reunited | None, tuple[str, ...]]:
        found = side.reunite()
        if side.link.cluster == victim:
            MANNERS[manner](side.link)
            return found, ()
        return found, side.goes_on()

    outcomes = at_once({name: functools.partial(act, side) for name, side in group.items()}, timeout_s=60)
    late = not isinstance(outcomes.pop(victim), Death)
    for name, outcome in outcomes.items():
        assert isinstance(outcome, tuple), (action, name, outcome)
        assert outcome[1] == group[name].link.members == tuple(outcomes), (action, name)
    assert len({group[name].link.epoch for name in outcomes}) == 1, action
    for side in group.values():
        side.link.close()
    return Lost(group, {name: outcome[0] for name, outcome in outcomes.items()}, late)


@pytest.mark.parametrize("manner", ["killed", "failed"])
@pytest.mark.parametrize("works", [(5.0, 5.0), (5.0, 0.0), (5.0, 5.0, 10.0), (5.0, 5.0, 0.0), (5.0, 5.0, 5.0, 5.0)])
def test_the_newcomer_is_lost_at_any_message(works: tuple[float, ...], manner: str) -> None:
    """The hosts end as if nothing had been, or all of them with all of it."""
    newcomer, hosts = NAMES[len(works) - 1], NAMES[: len(works) - 1]
    complete = set()
    for action in itertools.count(1):
        lost = lose(newcomer, newcomer, works, action, manner)
        assert tuple(lost.found) == hosts
        assert len({found is None for found in lost.found.values()}) == 1, action
        outcomes = {None if found is None else _bits(found) for found in lost.found.values()}
        assert len(outcomes) == 1, action
        complete |= outcomes
        if lost.late:
            break
    assert None in complete
    assert len(complete) == 2


@pytest.mark.parametrize("works", [(5.0, 5.0, 0.0), (5.0, 5.0, 10.0), (5.0, 5.0, 3.0, 0.0)])
def test_the_donor_is_lost_at_any_message(works: tuple[float, ...]) -> None:
    """Another one takes its place, and what has been fetched and verified is not sent again."""
    newcomer, donor = NAMES[len(works) - 1], "amber"
    resumed = 0
    for action in itertools.count(1):
        links = linked(len(works), chunk_bytes=128, chunks=2)
        links[newcomer].rtt_s[donor] = 0.0
        lost = lose(donor, newcomer, works, action, links=links, states=())
        assert len({_bits(found) for found in lost.found.values()}) == 1, action
        if not works[-1]:
            found = lost.found[newcomer]
            assert found is not None
            assert found.parameters is not None
            assert found.parameters.tobytes() == numbers(0).tobytes()
            assert fetched(lost.group[newcomer]) == wire_bytes(*SIZES), action
            sent = sum(lost.group[name].link.bytes_sent["PARAMETERS"] for name in NAMES[1 : len(works)])
            resumed += 0 < sent < wire_bytes(*SIZES)
        if lost.late:
            break
    assert action > 10
    assert resumed or works[-1]


def _bits(found: Reunited | None) -> bytes:
    """The parameters that a host or the newcomer has now."""
    assert found is not None
    return numbers(0).tobytes() if found.parameters is None else found.parameters.tobytes()


@pytest.mark.parametrize("works", [(5.0, 0.0), (5.0, 5.0)])
def test_the_only_host_is_lost(works: tuple[float, float]) -> None:
    """The newcomer has what it had, or all of what it should get, and goes on."""
    outcomes = set()
    for action in itertools.count(1):
        lost = lose("amber", "birch", works, action)
        found = lost.found["birch"]
        outcomes.add(None if found is None else _bits(found))
        if lost.late:
            break
    assert None in outcomes
    assert len(outcomes) == 2


def test_a_second_reunion_after_a_broken_one() -> None:
    """Nothing of the broken attempt is left: other numbers, another work."""
    lost = lose("cedar", "cedar", (5.0, 5.0, 5.0), 4)
    assert lost.found == {"amber": None, "birch": None}
    again = sides(3, "cedar", (5.0, 5.0, 10.0))
    for name in ("amber", "birch"):  # a reunion is kept for the next time
        lost.group[name].reunion._link = again[name].link
        again[name].reunion = lost.group[name].reunion
    half = np.float32(0.5)
    for found in all_reunite(again).values():
        assert found.parameters.tobytes() == (half * numbers(1) + half * numbers(0)).tobytes()


# Who does not play fair


def hosts_are_unharmed(group: Mapping[str, Side], newcomer: str, act: Callable[[], Any], reason: str) -> Any:
    """Reunite with a newcomer that does something else; returns what that gives."""

    def misbehave() -> Any:
        try:
            return act()
        finally:
            group[newcomer].link.close()

    hosts = {name: side for name, side in group.items() if name != newcomer}
    acts = {name: lambda side=side: (side.reunite(), side.goes_on()) for name, side in hosts.items()}
    outcomes = at_once({**acts, newcomer: misbehave}, timeout_s=60)
    told = outcomes.pop(newcomer)
    assert outcomes == dict.fromkeys(hosts, (None, tuple(hosts))), outcomes
    assert len({side.link.epoch for side in hosts.values()}) == 1
    sentences = [sentence for side in hosts.values() for sentence in side.events]
    assert any(reason in sentence for sentence in sentences), sentences
    return told


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize(("value", "at"), [(float("nan"), 0), (float("inf"), 9), (float("-inf"), NUMEL - 1)])
def test_numbers_that_are_not_finite(members: int, value: float, at: int) -> None:
    spoilt = numbers(1)
    spoilt[at] = value
    newcomer = NAMES[members - 1]
    group = sides(members, newcomer, (5.0,) * members, parameters=lambda joins: spoilt if joins else numbers(0))
    hosts_are_unharmed(group, newcomer, group[newcomer].reunite, "must hold finite numbers")


@pytest.mark.parametrize("members", [2, 3])
def test_numbers_that_are_not_those_announced(members: int) -> None:
    newcomer = NAMES[members - 1]
    group = sides(members, newcomer, (5.0,) * members)
    reads = itertools.count()
    group[newcomer].parameters = Plane(
        buckets(), lambda bucket: numbers(100 + next(reads))[bucket.start : bucket.stop].copy()
    )
    hosts_are_unharmed(group, newcomer, group[newcomer].reunite, "is not the one that it has announced")


@pytest.mark.parametrize("members", [2, 3])
def test_buckets_of_another_length(members: int) -> None:
    newcomer = NAMES[members - 1]
    group = sides(members, newcomer, (5.0,) * members)
    reads: Counter[int] = Counter()

    def read(bucket: Bucket) -> Any:
        reads[bucket.index] += 1
        return numbers(1, bucket.numel + (reads[bucket.index] == 3))  # when it is sent

    group[newcomer].parameters = Plane(buckets(), read)
    hosts_are_unharmed(group, newcomer, group[newcomer].reunite, "its bucket 0 must be 28 bytes, got 32")


def test_more_hashes_than_there_are_buckets() -> None:
    group = sides(3, "cedar", (5.0,) * 3)
    group["cedar"].parameters = plane(numbers(1, NUMEL + 5), (*SIZES, 5))
    hosts_are_unharmed(group, "cedar", group["cedar"].reunite, "4 hashes must be 32 bytes, got 40")


GOOD = {"step": 70, "turns": 9, "fields": FIELDS, "work": 1000.0, "history": [[COMMON, f"d{COMMON}", 990.0]]}


@pytest.mark.parametrize(
    "bad",
    [
        {"step": "70"},
        {"step": -1},
        {"step": 1 << 60},
        {"step": None},
        {"turns": 1.5},
        {"turns": 1 << 70},
        {"turns": -1},
        {"fields": []},
        {"work": "much"},
        {"work": -1.0},
        {"work": float("nan")},
        {"work": float("inf")},
        {"work": 10**400},
        {"history": None},
        {"history": [[1, 2]]},
        {"history": [[float("inf"), "d", 1.0]]},
        {"history": [[1, "d", float("nan")]]},
    ],
)
@pytest.mark.parametrize("members", [2, 3])
def test_a_note_that_is_none(members: int, bad: dict[str, Any]) -> None:
    newcomer = NAMES[members - 1]
    group = sides(members, newcomer, (5.0,) * members)
    hosts_are_unharmed(group, newcomer, lambda: scripted(group[newcomer].link, {**GOOD, **bad}), "must")


@pytest.mark.parametrize("choice", [{"donor": "cedar"}, {"donor": "delta"}, {"donor": None}, {"donor": ["amber"]}, {}])
def test_a_donor_that_is_no_host(choice: dict[str, Any]) -> None:
    group = sides(3, "cedar", (5.0,) * 3)
    told = "cluster 'cedar' must choose a host"
    hosts_are_unharmed(group, "cedar", lambda: scripted(group["cedar"].link, GOOD, choice), told)


def test_unlike_donors() -> None:
    """One host is told to send, and so is the other."""
    group = sides(3, "cedar", (5.0,) * 3)

    def act() -> None:
        link = group["cedar"].link
        scripted(link, GOOD, wait=False)
        for host in ("amber", "birch"):
            link.post(Kind.REUNION, pack_note({"donor": host}), round=COMMON + 1, part=1, to=[host])
        linger(link)

    hosts_are_unharmed(group, "cedar", act, "cedar")


@pytest.mark.parametrize("step", [0, 1, 2])
def test_who_sends_nonsense_between_two_messages(step: int) -> None:
    group = sides(3, "cedar", (5.0,) * 3)
    link = group["cedar"].link

    def act() -> None:
        if step == 0:
            link.post(Kind.ACCEPT, b"nonsense")
            link.post(Kind.REUNION, b"nonsense", round=COMMON + 1)
            linger(link)
        elif step == 1:
            scripted(link, GOOD, wait=False)
            link.post(Kind.REUNION, b"[]", round=COMMON + 1, part=1)
            linger(link)
        else:
            scripted(link, GOOD, {"donor": "amber"}, wait=False)
            link.post(Kind.DIGESTS, b"", round=COMMON + 1)
            linger(link)

    hosts_are_unharmed(group, "cedar", act, "cedar")


def scripted(
    link: Link, note: Mapping[str, Any], choice: Mapping[str, Any] | None = None, *, wait: bool = True
) -> None:
    """A newcomer by hand."""
    link.post(Kind.ACCEPT, pack_note({}))
    link.post(Kind.REUNION, pack_note(note), round=COMMON + 1)
    if choice is not None:
        link.post(Kind.REUNION, pack_note(choice), round=COMMON + 1, part=1)
    if wait:
        linger(link)


def linger(link: Link) -> None:
    """Hear everybody out until they have gone on alone."""
    for peer in link.peers:
        with contextlib.suppress(PeerLost):
            while link._await(peer):
                link._consume(peer)


@pytest.mark.parametrize("members", [2, 3])
def test_who_trains_something_else_is_told_and_the_hosts_go_on(members: int) -> None:
    newcomer = NAMES[members - 1]
    group = sides(
        members, newcomer, (5.0,) * members, fields=lambda joins: {**FIELDS, "max_steps": 200} if joins else FIELDS
    )
    told = hosts_are_unharmed(group, newcomer, group[newcomer].reunite, "max_steps=100")
    assert isinstance(told, HandshakeError)
    assert f"cluster {newcomer!r} cannot come back: it does not train the same thing: " in str(told)
    assert "max_steps=200" in str(told)


def test_an_introduction_is_read_as_it_was_meant() -> None:
    meant = Introduction(7, 3, {"max_steps": 100}, 1.5, [Entry(2, "ab", 0.5)], True)
    assert Introduction.parse(json.loads(json.dumps(meant.note())), "amber") == meant


def test_nobody_is_taken_beyond_the_end_by_a_newcomer() -> None:
    note = {"step": 101, "turns": 0, "work": 1.0, "history": [], "fields": FIELDS}
    with pytest.raises(ProtocolError, match=r"'amber' must stand at a step of 100 \(max_steps\) at most, got 101"):
        Introduction.parse(note, "cluster 'amber'")
    assert Introduction.parse({**note, "step": 100}, "").step == 100


def test_nobody_is_taken_beyond_the_end_by_a_host_with_a_plan_of_its_own() -> None:
    group = sides(3, "cedar", (5.0,) * 3)

    def act() -> None:
        link = group["birch"].link
        note = {**GOOD, "step": 1 << 50, "fields": {**FIELDS, "max_steps": 1 << 50}}
        link.post(Kind.REUNION, pack_note(note), round=COMMON + 1)
        linger(link)
        link.close()

    outcomes = at_once({"amber": group["amber"].reunite, "cedar": group["cedar"].reunite, "birch": act}, timeout_s=60)
    for name in ("amber", "cedar"):
        assert outcomes[name].step == 70
        assert group[name].link.members == ("amber", "cedar")
        assert any("at most, got 1125899906842624" in sentence for sentence in group[name].events)


def test_a_donor_that_lies_is_left() -> None:
    group = sides(3, "amber", (0.0, 5.0, 5.0), states=())
    group["amber"].link.rtt_s["birch"] = 0.0
    reads = itertools.count()
    group["birch"].parameters = Plane(
        buckets(), lambda bucket: numbers(100 + next(reads))[bucket.start : bucket.stop].copy()
    )
    outcomes = all_reunite(group)
    assert outcomes["amber"].parameters.tobytes() == numbers(0).tobytes()
    assert group["amber"].link.members == group["cedar"].link.members == ("amber", "cedar")
    assert "its bucket 0 is not the one that it has announced" in group["amber"].events[0]


def test_a_host_that_has_not_trained_keeps_nothing_of_a_broken_attempt() -> None:
    """It takes over what the newcomer brings, bit for bit, but it announces what it holds itself."""
    spoilt = numbers(1)
    spoilt[-1] = np.nan
    group = sides(2, "birch", (0.0, 5.0), parameters=lambda joins: spoilt if joins else numbers(0))
    hosts_are_unharmed(group, "birch", group["birch"].reunite, "must hold finite numbers")
    again = sides(2, "birch", (0.0, 5.0), parameters=lambda joins: numbers(0))
    group["amber"].reunion._link = again["amber"].link
    again["amber"].reunion = group["amber"].reunion
    for found in all_reunite(again).values():
        assert found.share == 1.0
        assert found.parameters.tobytes() == numbers(0).tobytes()
