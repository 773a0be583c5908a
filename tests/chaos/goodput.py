"""Goodput: what is left of two clusters' work when one of them is away a tenth of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.play import Setting, play, problems
from tests.chaos.schedule import Fault
from tests.faults.jobs import Zygote

__all__ = ["SETTING", "goodput", "measure"]

SETTING = Setting(
    "goodput", "local_steps", every="10", clusters=("west", "east"), doors=1, steps=1500, pace_s=0.1, step_s=0.14
)
_AWAY = 0.1
_EPISODES = 2
_STEP_S = 0.14  # about, with its share of the exchanges


def measure(
    setting: Setting, folder: Path, zygote: Zygote, say: Callable[[str], None] = lambda sentence: None
) -> dict[str, Any]:
    """Train twice at the same time, so that both have the same machine: without a fault, and with a link that is down.

    Args:
        setting: what trains.
        folder: an empty one.
        zygote: of ``tests.chaos.trainee``.
        say: told what happens.

    Returns:
        ``goodput`` (share of the undisturbed run's steps in the same time, both clusters together) and where it comes
        from.
    """
    away_s = round(_AWAY * setting.steps * _STEP_S / (1 - _AWAY) / _EPISODES, 1)
    at = [setting.steps * (2 * episode + 1) // (2 * _EPISODES + 1) for episode in range(_EPISODES)]
    schedule = [Fault(step, "cut cluster", ("east",), away_s, noticed=True, seed=0) for step in at]
    with ThreadPoolExecutor(2) as both:
        undisturbed = both.submit(play, setting, [], folder / "undisturbed", zygote, say)
        time.sleep(2)  # networks are made one after the other
        away = both.submit(play, setting, schedule, folder / "away", zygote, say)
    runs = {"undisturbed": undisturbed.result(), "away": away.result()}
    share, seconds = goodput(runs["away"].pop("timeline"), runs["undisturbed"].pop("timeline"))
    return {
        "setting": runs["away"]["setting"],
        "goodput": share,
        "seconds": seconds,
        "away_share": away_s * _EPISODES / seconds,
        "samples_dropped": runs["away"]["samples_dropped"],
        "problems": [problem for run in runs.values() for problem in problems(run)],
        **runs,
    }


def goodput(away: Sequence[tuple[float, int]], undisturbed: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """One run's steps as a share of another's, in the time that both have trained; and that time, seconds.

    Args:
        away, undisturbed: (seconds, steps so far), in order.
    """
    start = max(away[0][0], undisturbed[0][0])
    end = min(away[-1][0], undisturbed[-1][0])
    steps = [np.diff(np.interp((start, end), *zip(*timeline, strict=True)))[0] for timeline in (away, undisturbed)]
    return float(steps[0] / steps[1]), end - start
