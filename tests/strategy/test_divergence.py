"""Members that hold or send what they must not: whose parameters are right, and who leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.strategy.every_step import Average
from paddlenlp_nebula.strategy.initial import spread_parameters
from paddlenlp_nebula.strategy.opening import first_difference, majority

from ..link.clusters import NAMES, meet
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


@pytest.mark.parametrize("spoilt", [{1: 2.0, 3: 2.0}, {1: 2.0, 3: 3.0}, {0: 2.0, 1: 2.0}, {0: 2.0, 1: 3.0}])
def test_two_odd_ones_out_of_five_leave_at_once_and_the_majority_stays_together(spoilt: dict[int, float]) -> None:
    names = ("amber", "birch", "cedar", "delta", "elder")
    found = [Averager(link, on_loss="continue") for link in meet(*names).values()]
    for i, member in enumerate(found):
        member.exchange._resync = True
        if i in spoilt:
            spoil(member, spoilt[i])
    outcomes = together(found, lambda member, i: member.exchanged())
    assert all(isinstance(outcome, Average) for outcome in outcomes), outcomes
    right = tuple(name for i, name in enumerate(names) if i not in spoilt)
    for i, name in enumerate(names):
        assert found[i].link.members == ((name,) if i in spoilt else right)
        assert found[i].exchange.diverged == (i in spoilt)


def test_two_of_five_are_odd_each_in_its_own_way() -> None:
    digests = dict.fromkeys("abcde", (1, 2)) | {"b": (1, 3), "d": (0, 2)}
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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [2, 3])
def test_who_sends_numbers_that_are_not_finite_is_no_member_any_more(count: int, value: float) -> None:
    """Nobody does by accident, since all look at their own; the others go on."""
    found = group(count)
    hostile = found[1].strategy

    def gradient(bucket: Bucket, *_: Any) -> Any:
        vector = hostile._gather(bucket)
        vector[-1] = value
        return vector

    hostile._gradient = gradient  # type: ignore[method-assign]
    outcomes = together(found, lambda member, i: member.exchanged())
    others = [i for i in range(count) if i != 1]
    for i in others:
        assert isinstance(outcomes[i], Average), outcomes[i]
        assert "birch" not in found[i].link.members
        assert np.isfinite(outcomes[i].values).all()
        assert "its bucket 0 does not decode: it must hold finite numbers" in found[i].sentences[0]
    assert len({outcomes[i].values.tobytes() for i in others}) == 1


def test_nobody_starts_from_numbers_that_are_not_finite() -> None:
    found = members(2)
    parameter = found[0].selection.parameters[0]
    parameter.set_value(parameter * np.nan)
    values = [np.empty(member.selection.numel, np.float32) for member in found]
    outcomes = together(found, lambda member, i: spread_parameters(member.exchange, NAMES[0], values[i]))
    assert isinstance(outcomes[1], PeerLost)
    assert "bucket 0 from cluster 'amber' must hold finite numbers" in str(outcomes[1])


def test_equal_members_have_no_difference() -> None:
    assert first_difference([(1, 2), (1, 2)]) is None
    assert majority({"a": (1,), "b": (2,)}) is None
