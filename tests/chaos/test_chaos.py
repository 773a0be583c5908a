"""The short version, two minutes on two idle cores: every few seconds something breaks, and three clusters train on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.figures import gap_percent
from tests.chaos.play import Setting, play, problems
from tests.chaos.schedule import Fault
from tests.faults.jobs import Zygote
from tests.support.wan import available

REASON = available(delay=True)
pytestmark = [pytest.mark.mpi, pytest.mark.netns, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SETTING = Setting("short", "local_steps", steps=320)
SCHEDULE = [
    Fault(30, "kill trainer", ("east",), 1.0, True, 0),
    Fault(90, "cut pair briefly", ("east", "mid"), 1.5, False, 0),
    Fault(110, "damage above TCP", ("mid",), 0.0, False, 5),
    Fault(160, "cut cluster", ("mid",), 7.0, True, 0),
    Fault(240, "kill courier", ("west",), 0.0, True, 0),
]


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("tests.chaos.trainee")
    yield zygote
    zygote.close()


@pytest.mark.timeout(300, func_only=True)
def test_three_clusters_survive(zygote: Zygote, tmp_path: Path) -> None:
    quiet = play(SETTING.undisturbed, [], tmp_path / "undisturbed", zygote)
    assert problems(quiet) == []
    result = play(SETTING, SCHEDULE, tmp_path / "chaos", zygote, say=lambda sentence: print(sentence, file=sys.stderr))
    assert problems(result) == [], json.dumps(result, indent=1)
    assert result["faults_injected"] == len(SCHEDULE)
    assert result["returns"] >= 4
    assert result["samples_dropped"] == 0
    gap = gap_percent(result["loss"], quiet["loss"])
    assert gap is not None
    assert gap < 2.0
