"""Goodput: what is left of two clusters' work when one of them is away a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.play import Setting, play, problems
from tests.chaos.schedule import Fault
from tests.faults.jobs import Zygote

__all__ = ["SETTING", "measure"]

SETTING = Setting("goodput", "local_steps", every="10", clusters=("west", "east"), doors=1, steps=2000)
_AWAY = 0.1
_EPISODES = 2


def measure(
    setting: Setting, folder: Path, zygote: Zygote, say: Callable[[str], None] = lambda sentence: None
) -> dict[str, Any]:
    """Train the same steps without a fault and with a link that is down a tenth of the time that this takes.

    Args:
        setting: what trains.
        folder: an empty one.
        zygote: of ``tests.chaos.trainee``.
        say: told what happens.

    Returns:
        ``goodput`` (share of the undisturbed rate of steps, both clusters together) and where it comes from.
    """
    quiet = play(setting, [], folder / "undisturbed", zygote, say)
    away_s = round(_AWAY * quiet["training_s"] / _EPISODES, 1)
    at = [setting.steps * (2 * episode + 1) // (2 * _EPISODES + 1) for episode in range(_EPISODES)]
    schedule = [Fault(step, "cut cluster", ("east",), away_s, noticed=True, seed=0) for step in at]
    away = play(setting, schedule, folder / "away", zygote, say)
    rates = [sum(run["steps"].values()) / run["training_s"] for run in (quiet, away)]
    return {
        "goodput": rates[1] / rates[0],
        "away_s": away_s * _EPISODES,
        "away_share": away_s * _EPISODES / away["training_s"],
        "steps_per_s": rates,
        "samples_dropped": away["samples_dropped"],
        "problems": [*problems(quiet), *problems(away)],
        "undisturbed": quiet,
        "away": away,
    }
