"""One run: clusters train together, from scratch or from a dense checkpoint; its row."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from benchmarks.quality.cluster import Clusters, clusters_of, overwrite
from benchmarks.quality.model import Decoder
from benchmarks.quality.setting import DENSE, Setting
from benchmarks.quality.text import Text, load_text
from paddlenlp_nebula.selection import select
from paddlenlp_nebula.strategy.pace import Pace

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """What all runs have in common.

    Attributes:
        width, depth, heads, context: of the model, see `Decoder`.
        steps: optimizer steps of a whole training.
        windows: sequences per cluster and step.
        lr: peak learning rate, after the warm-up, if the setting names none; it falls to zero as a cosine.
        warm_up: steps in which it rises, if the setting names none.
        evaluation: held-out windows for the final loss.
        points: evaluations along the way, on an eighth of these.
        sample: train on the small sample of this repository.
    """

    width: int = 192
    depth: int = 2
    heads: int = 6
    context: int = 96
    steps: int = 2000
    windows: int = 4
    lr: float = 2e-3
    warm_up: int = 100
    evaluation: int = 1024
    points: int = 10
    sample: bool = False

    def rate(self, step: int, setting: Setting) -> float:
        """The learning rate of a step, from 0."""
        peak, warm_up = setting.lr or self.lr, setting.warm_up or self.warm_up
        if step < warm_up:
            return peak * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return peak * 0.5 * (1 + math.cos(math.pi * done))

    def checkpoint(self, folder: Path, clusters: int, seed: int) -> Path:
        """The file for a dense checkpoint of this training."""
        same = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return folder / f"dense-{same}-{clusters}-{seed}.npz"

    def run(self, setting: Setting, start: str, clusters: int, seed: int, checkpoint: Path) -> list[dict[str, Any]]:
        """Train, and say how it went: one row, or for the dense run, which writes the checkpoint, one per start.

        Args:
            setting: the strategy.
            start: ``scratch``, or ``continued`` from a third of the dense run, with its optimizer's state.
            clusters: how many.
            seed: of the initial parameters and the order of the data.
            checkpoint: where the dense run leaves its state after a third, see `checkpoint`.
        """
        text = load_text(self.context, sample=self.sample)
        paddle.seed(seed)
        models = [Decoder(self.width, self.depth, self.heads, self.context) for _ in range(clusters)]
        group = clusters_of(models, setting.arguments(clusters))
        dense = str(setting) == DENSE
        begin = 0
        if start == "continued" and not dense:
            begin = self.steps // 3
            with np.load(checkpoint) as state:
                _spread(group, dict(state))
        else:
            _spread(group, {"parameters": group.members[0].parameters()})
        for member in group.members:
            member.join()
        run = _Run(self, setting, group, text, seed)
        at_start = {"scratch": run.counters()} if start == "scratch" or dense else {"continued": run.counters()}
        for step in range(begin, self.steps):
            if dense and step == self.steps // 3:
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                np.savez(checkpoint, **group.members[0].state())
                at_start["continued"] = run.counters()
            run.step(step)
        loss = run.evaluate(self.evaluation)
        rows = [
            {
                "setting": str(setting),
                "start": kind,
                "clusters": clusters,
                "seed": seed,
                **run.since(then),
                "eval_loss": loss,
            }
            for kind, then in at_start.items()
        ]
        group.close()
        return rows


class _Run:
    """A training under way."""

    def __init__(self, training: Training, setting: Setting, group: Clusters, text: Text, seed: int) -> None:
        self._training = training
        self._setting = setting
        self._group = group
        self._text = text
        self._seed = seed
        self._pace = Pace.parse(setting.every)
        self._since_round = self._rounds = self._steps = self._tokens = 0
        self._curve: list[list[float]] = []
        self._started = time.process_time()
        self._spare = Decoder(training.width, training.depth, training.heads, training.context)

    def step(self, step: int) -> None:
        """An optimizer step of all clusters, and a round if it is due."""
        training, members = self._training, self._group.members
        rate = training.rate(step, self._setting)
        for index, member in enumerate(members):
            total = training.windows * len(members)
            member.compute(self._text.batch(self._seed, step, len(members), index, total))
        if self._setting.strategy == "every_step":
            self._group.together(lambda member: member.average_gradients(step + 1))
            self._rounds += 1
        for member in members:
            member.step(rate)
        last = step + 1 == training.steps
        if self._setting.strategy == "local_steps":
            self._merge(step + 1, last)
        self._steps += 1
        self._tokens += training.context * training.windows * len(members)
        if (step + 1) % max(1, training.steps // training.points) == 0:
            self._curve.append([self._tokens, round(self.evaluate(training.evaluation // 8), 4)])

    def _merge(self, step: int, last: bool) -> None:
        if self._since_round == 0:
            self._every = self._pace.steps(step - 1, self._training.steps)
        self._since_round += 1
        if last or self._since_round >= self._every:
            self._group.together(lambda member: member.merge(step, last))
            self._since_round = 0
            self._rounds += 1

    def evaluate(self, windows: int) -> float:
        """Loss on held-out text of the mean of the clusters' parameters, which are equal after the last round."""
        mean = np.mean([member.parameters() for member in self._group.members], axis=0, dtype=np.float64)
        overwrite(select(self._spare, "trainable"), mean.astype(np.float32))
        held_out = self._text.held_out[:windows]
        parts = np.array_split(held_out, max(1, len(held_out) // 32))
        with paddle.no_grad():
            losses = [float(self._spare(paddle.to_tensor(part))) * len(part) for part in parts]
        return sum(losses) / len(held_out)

    def counters(self) -> dict[str, float]:
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "rounds": self._rounds,
            "bytes_sent": max(member.bytes_sent for member in self._group.members),
            "seconds": time.process_time() - self._started,
            "points": len(self._curve),
        }

    def since(self, then: dict[str, float]) -> dict[str, Any]:
        """What has happened since."""
        now = self.counters()
        done = {name: now[name] - then[name] for name in now}
        clusters = len(self._group.members)
        parameters = self._group.members[0].selection.numel
        # What a ring all-reduce of fp32 gradients sends, as in the ledger's reports.
        dense = 2 * (clusters - 1) / clusters * 4 * parameters * done["steps"]
        return {
            "tokens": done["tokens"],
            "steps": done["steps"],
            "rounds": done["rounds"],
            "parameters": parameters,
            "bytes_sent": done["bytes_sent"],
            "reduction": dense / done["bytes_sent"],
            "lr": self._setting.lr or self._training.lr,
            "text": self._text.name,
            "curve": [[int(at - then["tokens"]), loss] for at, loss in self._curve[int(then["points"]) :]],
            "cpu_seconds": round(done["seconds"], 1),
        }


def _spread(group: Clusters, state: dict[str, Any]) -> None:
    for member in group.members:
        member.restore(state)
