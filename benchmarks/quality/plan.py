"""Which runs there are to do, and doing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.quality.results import Results
from benchmarks.quality.setting import DENSE, Setting
from benchmarks.quality.show import STARTS, shown
from benchmarks.quality.training import Training

__all__ = ["CLUSTERS", "SEED", "Run", "confirmed", "searched", "work"]

CLUSTERS, MORE_CLUSTERS = 2, 4
SEED, SEEDS = 1, (1, 2, 3)
_SEARCH = Path(__file__).with_name("search.txt")


class Run(NamedTuple):
    """What is to be run; together with the training it determines the row."""

    setting: Setting
    start: str
    clusters: int
    seed: int


def searched() -> list[Run]:
    """search.txt: a setting per line, before it the only start that it is for, if not both."""
    found = []
    for line in _SEARCH.read_text().splitlines():
        if not (text := line.partition("#")[0].strip()):
            continue
        first, _, rest = text.partition(" ")
        starts, text = ((first,), rest) if first in STARTS else (STARTS, text)
        found += [Run(Setting.parse(text), start, CLUSTERS, SEED) for start in starts]
    return found


def confirmed(results: Results) -> list[Run]:
    """Dense and the best at 400 and at 4,000 times fewer bytes, from each start: further seeds, and more clusters."""
    rows = results.rows()
    again = [(CLUSTERS, seed) for seed in SEEDS] + [(MORE_CLUSTERS, SEED)]
    chosen = [(text, start) for start in STARTS for text in shown(rows, start, CLUSTERS, SEED)]
    return [Run(Setting.parse(text), start, *group) for group in again for text, start in chosen]


def work(results: Results, training: Training, checkpoints: Path, plan: Callable[[], Sequence[Run]]) -> None:
    """Do what is planned and has no row yet, the dense runs first; the plan is asked for anew after each run."""
    while (due := next((run for run in plan() if not results.has(*run)), None)) is not None:
        dense = due._replace(setting=Setting.parse(DENSE))
        checkpoint = training.checkpoint(checkpoints, due.clusters, due.seed)
        if not results.has(*dense) or (due.start == "continued" and not checkpoint.exists()):
            due = dense
        rows = training.run(*due, checkpoint)
        for row in results.append(rows):
            gap = "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f} %"
            print(
                f"{row['setting']:70} {row['start']:9} {row['clusters']} clusters, seed {row['seed']}: "
                f"{row['reduction']:6,.0f}x, loss {row['eval_loss']:.4f} {gap} ({row['cpu_seconds']:.0f} s)",
                flush=True,
            )
