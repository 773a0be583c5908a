"""Membership: whenever and however members are lost, the others end with equal results and equal lists."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather, all_gather_notes
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party, agree_on_members, compatible
from paddlenlp_nebula.link.notes import pack_note

from .clusters import NAMES, at_once, meet

ROUNDS = 4
PARTS = 2


class Death(BaseException):
    """The end of a victim."""


Manner = Callable[[Link], None]
MANNERS: dict[str, Manner] = {
    "killed": lambda link: link.close(),
    "failed": lambda link: link.leave("it failed", deliberate=False, linger_s=0.05),
    "finished": lambda link: link.leave("it has had enough", deliberate=True, linger_s=0.05),
    "stopped": lambda link: None,  # all connections stay open
}


def dies_at(link: Link, action: int, manner: Manner) -> None:
    """Let the member die just before its ``action``-th message to a peer, or wait for one."""
    count = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def acted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == action:
                manner(link)
                raise Death
            return act(*args, **kwargs)

        return acted

    for stream in link._streams.values():
        stream.push = counted(stream.push)  # type: ignore[method-assign]
    link._await = counted(link._await)  # type: ignore[method-assign]


def exchange(link: Link, number: int) -> dict[str, Any]:
    """What a strategy does: an opening, some parts, an end. Returns who contributed what."""
    notes = all_gather_notes(link, {"number": number}, round=number, kind=Kind.NOTE)
    assert all(note["number"] == number for note in notes.values())
    parts: dict[str, list[int]] = {name: [] for name in link.members}
    for part, member, payload in all_gather(
        link, Kind.BUCKET, number, PARTS, lambda part: memoryview(bytes([number, part]) * 2000)
    ):
        assert bytes(payload[:2]) == bytes([number, part])
        parts[member].append(part)
    link.post(Kind.END, round=number)
    for peer in link.peers:
        with link.receive(peer, Kind.END, round=number):
            pass
    return parts


def train(
    link: Link, *, on_loss: str = "continue", quorum: int = 1, sentences: list[str] | None = None
) -> dict[str, Any]:
    """Some rounds; returns what each gave."""
    party = Party(link, on_loss=on_loss, quorum=quorum, report=(sentences if sentences is not None else []).append)
    results = [party.together(lambda number: exchange(link, number)) for _ in range(ROUNDS)]
    assert party.number == ROUNDS
    return {"results": results, "members": link.members, "ended": party.ended is not None, "epoch": link.epoch}


def survivors_of(links: dict[str, Link], *victims: str) -> dict[str, Any]:
    """Train; returns the survivors' outcomes after checking that they are equal."""
    outcomes = at_once({name: functools.partial(train, link) for name, link in links.items()})
    for victim in victims:
        left = outcomes.pop(victim)
        assert isinstance(left, Death | dict), left
    first = next(iter(outcomes.values()))
    assert isinstance(first, dict), first
    for name, outcome in outcomes.items():
        assert outcome == first, name
    return first


def actions_of(members: int) -> range:
    """From the first action of a member to beyond the last one of round 2."""
    peers = members - 1
    per_round = peers * (2 + 2 * PARTS + 2 + (2 if members > 2 else 0))
    return range(1, 2 * per_round + 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("manner", ["killed", "failed", "finished"])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_one_is_lost_at_any_stage(members: int, manner: str) -> None:
    for victim in (NAMES[0], NAMES[members - 1]):
        for action in actions_of(members):
            links = meet(*NAMES[:members], timeout_s=5.0)
            dies_at(links[victim], action, MANNERS[manner])
            outcome = survivors_of(links, victim)
            assert victim not in outcome["members"], action
            assert len(outcome["members"]) == members - 1
            assert outcome["ended"] is (manner == "finished")
            assert set(outcome["results"][-1]) == set(outcome["members"])
            for link in links.values():
                link.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("action", [1, 2, 3, 8, 11, 14, 15, 16])
def test_one_falls_silent_at_any_stage(action: int) -> None:
    """Nothing closes: only the wait tells, and nobody takes those who wait too for dead."""
    links = meet(*NAMES[:3], timeout_s=1.5)
    dies_at(links["birch"], action, MANNERS["stopped"])
    start = time.monotonic()
    assert survivors_of(links, "birch")["members"] == ("amber", "cedar")
    assert 1.5 <= time.monotonic() - start < 15


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("first", "second"), [(a, b) for a in (2, 7, 19, 30) for b in (1, 9, 20, 25, 31, 33, 36, 40)])
def test_two_of_four_are_lost(first: int, second: int) -> None:
    """Also the second one while the loss of the first is being settled."""
    links = meet(*NAMES, timeout_s=5.0)
    dies_at(links["amber"], first, MANNERS["killed"])
    dies_at(links["cedar"], second, MANNERS["failed"])
    assert survivors_of(links, "amber", "cedar")["members"] == ("birch", "delta")


def test_nobody_is_lost() -> None:
    outcome = survivors_of(meet(*NAMES))
    assert outcome["members"] == NAMES
    assert outcome["epoch"] == 0
    assert outcome["results"] == [{name: [0, 1] for name in NAMES}] * ROUNDS


def test_a_loss_is_reported_in_a_sentence() -> None:
    links = meet(*NAMES[:3])
    dies_at(links["cedar"], 24, MANNERS["failed"])
    sentences: dict[str, list[str]] = {name: [] for name in links}
    at_once({name: functools.partial(train, link, sentences=sentences[name]) for name, link in links.items()})
    for name in ("amber", "birch"):
        assert sentences[name] == ["cluster 'cedar' was lost after exchange 1: it failed; members now: amber, birch"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("quorum", [1, 2])
def test_a_cluster_whose_own_payload_is_refused_goes_on_by_itself(members: int, quorum: int) -> None:
    links = meet(*NAMES[:members], timeout_s=5.0)
    *others, refused = NAMES[:members]
    sentences: dict[str, list[str]] = {name: [] for name in links}

    def run(name: str, link: Link) -> tuple[str, ...]:
        def attempt(number: int) -> None:
            if refused in link.members and link.peers:  # everybody finds the same, the culprit too
                raise PeerLost(refused, "its bucket 0 must hold finite numbers")

        party = Party(link, on_loss="continue", quorum=quorum, report=sentences[name].append)
        party.together(attempt)
        return link.members

    outcomes = at_once({name: functools.partial(run, name, link) for name, link in links.items()})
    for link in links.values():
        link.close()
    assert all(sentence.partition("members now: ")[2] for said in sentences.values() for sentence in said)
    if quorum == 1:
        assert outcomes[refused] == (refused,)
        assert sentences[refused][-1].endswith(f"; members now: {refused}")
        assert "what this cluster has sent: its bucket 0 must hold finite numbers" in sentences[refused][-1]
    else:
        assert isinstance(outcomes[refused], NebulaError)
        assert f"only 1 of them ({refused}) can: " in str(outcomes[refused])
    for name in others:
        if len(others) >= quorum:
            assert outcomes[name] == tuple(others)


def test_stop_raises_on_every_survivor() -> None:
    links = meet(*NAMES[:3])
    dies_at(links["cedar"], 20, MANNERS["failed"])

    def stop(link: Link) -> None:
        try:
            train(link, on_loss="stop")
        except PeerLost as loss:
            link.leave(str(loss), deliberate=False, linger_s=0.1)
            raise

    outcomes = at_once({name: functools.partial(stop, link) for name, link in links.items()})
    for name in ("amber", "birch"):
        assert isinstance(outcomes[name], PeerLost)
        assert "it failed" in str(outcomes[name])


def test_a_deliberate_goodbye_is_no_reason_to_stop() -> None:
    links = meet("amber", "birch")
    dies_at(links["birch"], 12, MANNERS["finished"])
    outcome = at_once({name: functools.partial(train, link, on_loss="stop") for name, link in links.items()})["amber"]
    assert outcome["ended"]
    assert outcome["members"] == ("amber",)


@pytest.mark.parametrize(("quorum", "goes_on"), [(2, True), (3, False)])
def test_quorum(quorum: int, goes_on: bool) -> None:
    links = meet(*NAMES[:3])
    dies_at(links["amber"], 20, MANNERS["killed"])
    outcomes = at_once({name: functools.partial(train, link, quorum=quorum) for name, link in links.items()})
    for name in ("birch", "cedar"):
        if goes_on:
            assert outcomes[name]["members"] == ("birch", "cedar")
        else:
            assert "3 clusters are needed to go on (sync_quorum) but only" in str(outcomes[name])
            assert "birch" in str(outcomes[name])


@pytest.mark.parametrize(
    ("cut", "together", "apart"),
    [
        (("amber", "cedar"), ("amber", "birch"), "cedar"),
        (("birch", "cedar"), ("amber", "birch"), "cedar"),
        (("amber", "birch"), ("amber", "cedar"), "birch"),
    ],
)
def test_a_link_between_two_of_three_dies(cut: tuple[str, str], together: tuple[str, str], apart: str) -> None:
    """All can still reach one: two stay together, the third goes on alone, and everybody says so."""
    links = meet(*NAMES[:3], timeout_s=2.0)
    sentences: dict[str, list[str]] = {name: [] for name in links}
    links[cut[0]]._streams[cut[1]].channel.close()
    outcomes = at_once(
        {name: functools.partial(train, link, sentences=sentences[name]) for name, link in links.items()}
    )
    for name in together:
        assert outcomes[name]["members"] == together
        assert outcomes[name]["results"] == outcomes[together[0]]["results"]
    assert outcomes[apart]["members"] == (apart,)
    assert [sentence.split("'")[1] for sentence in sorted(sentences[apart])] == list(together)
    assert all(f"cluster '{apart}' was lost" in sentences[name][0] for name in together)


def test_epochs_stay_equal_though_one_settled_earlier() -> None:
    """Amber settles one loss before birch does; afterwards both must still hear each other."""
    links = meet(*NAMES, timeout_s=2.0)
    amber, birch, cedar, delta = links.values()
    delta.close()
    cedar.post(Kind.EPOCH, pack_note({"members": NAMES[:3], "committed": 0, "lost": []}), to=["amber"])

    def at_amber() -> int:
        amber.drop(PeerLost("delta", "it closed its link"))
        agree_on_members(amber, 0, amber.drop)
        cedar.close()
        with pytest.raises(NebulaError):
            all_gather_notes(amber, {}, round=1)
        amber.drop(PeerLost("cedar", "it closed its link"))
        agree_on_members(amber, 0, amber.drop)
        return amber.epoch

    def at_birch() -> int:
        birch.drop(PeerLost("delta", "it closed its link"))
        agree_on_members(birch, 0, birch.drop)
        return birch.epoch

    assert at_once({"amber": at_amber, "birch": at_birch}) == {"amber": 2, "birch": 2}
    assert amber.members == birch.members == ("amber", "birch")
    everyone = at_once({n: lambda n=n: all_gather_notes(links[n], {"n": n}, round=1) for n in ("amber", "birch")})
    assert everyone["amber"] == everyone["birch"] == {"amber": {"n": "amber"}, "birch": {"n": "birch"}}


@pytest.mark.parametrize(
    "proposal",
    [
        {},
        {"members": 3, "committed": 0},
        {"members": ["amber", "birch", "mallory"], "committed": 0},
        {"members": ["amber"], "committed": 0},
        {"members": ["amber", ["birch"]], "committed": 0},
        {"members": ["amber", "birch"], "committed": 10**18},
        {"members": ["amber", "birch"], "committed": "many"},
        {"members": ["amber", "birch"]},
        {"members": ["amber", "birch"], "committed": 0, "lost": [1]},
        {"members": ["amber", "birch"], "committed": 0, "lost": {"cedar": "why"}},
    ],
)
def test_who_proposes_nonsense_is_lost(proposal: dict[str, Any]) -> None:
    amber, birch = meet("amber", "birch").values()
    losses: list[PeerLost] = []
    birch.post(Kind.EPOCH, pack_note(proposal))
    agree_on_members(amber, 0, lambda loss: (losses.append(loss), amber.drop(loss))[0])
    assert [loss.peer for loss in losses] == ["birch"]
    assert amber.members == ("amber",)


def test_an_impossible_epoch_is_refused() -> None:
    amber, birch = meet("amber", "birch").values()
    birch.epoch = 2**32 - 1
    birch.post(Kind.EPOCH, pack_note({"members": ["amber", "birch"], "committed": 0, "lost": []}))
    agree_on_members(amber, 0, amber.drop)
    assert (amber.members, amber.epoch) == (("amber",), 1)


@pytest.mark.parametrize(
    ("reach", "kept"),
    [
        ({}, "abcd"),
        ({"a": "abc"}, "abc"),
        ({"a": "abd", "d": "abcd"}, "abd"),
        ({"b": "bcd", "a": "acd"}, "acd"),
        ({"c": "bcd"}, "abd"),
        ({"a": "a", "b": "bcd"}, "a"),
        ({"d": "abcd", "b": "bc"}, "acd"),
    ],
)
def test_earlier_members_are_kept_where_two_cannot_reach_each_other(reach: dict[str, str], kept: str) -> None:
    assert compatible("abcd", reach) == tuple(kept)
