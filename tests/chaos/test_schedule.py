"""Schedules are data, made from a seed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.schedule import ANYTHING, WITHOUT_RETURN, plan

_RUN: dict[str, Any] = {"steps": 3000, "step_s": 0.1, "deadline_s": 5.0, "settle_s": 3.0, "overlap": 0.15}
_CLUSTERS = ("west", "mid", "east")


def test_the_seed_makes_the_schedule() -> None:
    assert plan(7, _CLUSTERS, **_RUN) == plan(7, _CLUSTERS, **_RUN)
    assert plan(7, _CLUSTERS, **_RUN) != plan(8, _CLUSTERS, **_RUN)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_schedule_holds(seed: int) -> None:
    faults = plan(seed, _CLUSTERS, **_RUN)
    assert {fault.what for fault in faults} == set(ANYTHING)  # all before any comes again
    assert [fault.at_step for fault in faults] == sorted(fault.at_step for fault in faults)
    for fault in faults:
        assert 60 <= fault.at_step < 3000 - 30
        assert set(fault.target) <= set(_CLUSTERS)
        assert len(set(fault.target)) == (2 if "pair" in fault.what else 1)
        lasts = fault.duration_s > _RUN["deadline_s"]
        assert fault.noticed == (lasts or "kill" in fault.what or "memory" in fault.what) or "link" in fault.what
        assert not ("briefly" in fault.what and fault.duration_s > 0.6 * _RUN["deadline_s"])


def test_overlap() -> None:
    def overlapping(overlap: float) -> int:
        faults = plan(1, _CLUSTERS, **{**_RUN, "overlap": overlap})
        ends = [fault.at_step + fault.duration_s / _RUN["step_s"] for fault in faults]
        return sum(end > fault.at_step for end, fault in zip(ends, faults[1:], strict=False))

    assert overlapping(0.0) == 0
    assert overlapping(1.0) > 5


def test_kinds_can_be_chosen() -> None:
    mild = plan(1, _CLUSTERS, **_RUN, kinds=WITHOUT_RETURN)
    assert {fault.what for fault in mild} == set(WITHOUT_RETURN)
    assert not any(fault.noticed for fault in mild)
