"""Members that should hold the same parameters and do not: whose are right, and who leaves."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.strategy.every_step import Average
from paddlenlp_nebula.strategy.opening import first_difference, majority

from ..link.clusters import NAMES
from .members import together
from .test_every_step import Averager, members


def spoil(member: Averager, factor: float = 2.0) -> None:
    parameter = member.selection.parameters[-1]
    parameter.set_value(parameter * factor + 1)
    member.exchange.refresh_digests()


def group(count: int) -> list[Averager]:
    found = members(count, on_loss="continue")
    for member in found:
        member.exchange._resync = True
    return found


@pytest.mark.parametrize(("count", "odd"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 3)])
def test_the_odd_one_out_leaves_and_the_majority_goes_on(count: int, odd: int) -> None:
    found = group(count)
    spoil(found[odd])
    outcomes = together(found, lambda member, i: member.exchanged())
    assert all(isinstance(outcome, Average) for outcome in outcomes), outcomes
    rest = tuple(name for i, name in enumerate(NAMES[:count]) if i != odd)
    right = [i for i in range(count) if i != odd]
    assert [found[i].link.members for i in right] == [rest] * (count - 1)
    assert len({outcomes[i].values.tobytes() for i in right}) == 1
    assert found[odd].link.members == (NAMES[odd],)
    assert [member.exchange.diverged for member in found] == [i == odd for i in range(count)]
    for i in right:
        (sentence,) = found[i].sentences
        assert f"cluster {NAMES[odd]!r} was lost" in sentence
        assert "must hold identical parameters before round 1, but bucket" in sentence


def test_two_of_five_are_odd_each_in_its_own_way() -> None:
    digests = {name: (1, 2) for name in "abcde"} | {"b": (1, 3), "d": (0, 2)}
    assert majority(digests) == ("a", "c", "e")
    assert first_difference(list(digests.values())) == 0


@pytest.mark.parametrize("spoilt", [{1: 2.0, 3: 2.0}, {1: 2.0, 3: 3.0}])
def test_no_majority_stops_everybody(spoilt: dict[int, float]) -> None:
    found = group(4)
    for i, factor in spoilt.items():
        spoil(found[i], factor)
    for outcome in together(found, lambda member, i: member.exchanged()):
        assert isinstance(outcome, NebulaError)
        assert not isinstance(outcome, PeerLost)
        assert "must hold identical parameters" in str(outcome)


def test_without_resync_everybody_stops() -> None:
    found = members(3)
    spoil(found[1])
    for outcome in together(found, lambda member, i: member.exchanged()):
        assert "must hold identical parameters" in str(outcome)
    assert not any(member.exchange.diverged for member in found)


def test_equal_members_have_no_difference() -> None:
    assert first_difference([(1, 2), (1, 2)]) is None
    assert majority({"a": (1,), "b": (2,)}) is None
