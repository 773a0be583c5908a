"""What errors that wait do to LoRA under local steps and top-k: the evidence for the sentence of `doubts`.

Two clusters fine-tune the classifier of test_rules, each on half of the data, and exchange by the real classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.adapters.merge import Factors
from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.selection import select
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.tensors import write

from ..link.clusters import at_once, meet
from .test_rules import HIDDEN, WIDTH, Adam, Task, change_of

NAMES = ("amber", "birch")
RANK, STEPS, EVERY, BATCH = 8, 600, 15, 32


class Cluster:
    """One cluster; every so many steps of its own optimizer it exchanges what they have changed."""

    def __init__(self, link: Link, codec: Codec, keep_unsent: bool) -> None:
        rng = np.random.default_rng(1000)  # the same start everywhere
        a = (rng.uniform(-1, 1, (WIDTH, RANK)) / np.sqrt(WIDTH)).astype(np.float32)
        self.factors = Factors(a, np.zeros((RANK, HIDDEN), dtype=np.float32), 2.0)
        layer = paddle.nn.Layer()
        for name, factor in (("a", self.factors.a), ("b", self.factors.b)):
            layer.add_parameter(name, layer.create_parameter(list(factor.shape)))
        self.selection = select(layer, "trainable")
        self._write()
        party = Party(link, on_loss="stop", quorum=1, report=print)
        self.strategy = LocalSteps(
            Exchange(self.selection, codec, party),
            OuterOptimizer("average"),
            1,
            same_step=True,
            final_codec=codec_from_spec("int8") if keep_unsent else None,
            keep_unsent=keep_unsent,
        )

    def train(self, task: Task, x: npt.NDArray[Any], y: npt.NDArray[Any], seed: int) -> list[float]:
        """The common model's loss after each round."""
        rng, optimizer, losses = np.random.default_rng(seed), Adam(self.factors), []
        parameters = self.selection.parameters
        for step in range(1, STEPS + 1):
            batch = rng.integers(0, len(y), BATCH)
            self.factors = optimizer.step(self.factors, task.gradients(self.factors, x[batch], y[batch]))
            if step % EVERY == 0:
                self._write()
                merge = self.strategy.merge(LocalWork(step, 1.0, final=step == STEPS))
                apply_merge(
                    self.selection,
                    self.strategy.exchange.buckets,
                    merge.parts,
                    merge.values,
                    lambda index, values: write(parameters[index], values),
                )
                self.factors = Factors(*(p.numpy() for p in parameters), self.factors.scaling)
                losses.append(self._common_loss(task))
        return losses

    def _write(self) -> None:
        for parameter, factor in zip(self.selection.parameters, self.factors[:2], strict=True):
            write(parameter, factor.reshape(-1))

    def _common_loss(self, task: Task) -> float:
        a, b = np.split(np.asarray(self.strategy.anchor), [WIDTH * RANK])
        anchor = Factors(a.reshape(WIDTH, RANK), b.reshape(RANK, HIDDEN), self.factors.scaling)
        x, y = (part[:1000] for part in task.test)
        logits = 4 * task.outputs(x, change_of(anchor))[1]
        largest = logits.max(1)
        return float(np.mean(np.log(np.exp(logits.T - largest).sum(0)) + largest - logits[np.arange(len(y)), y]))


def losses(spec: str, decay: float = 1.0, *, keep_unsent: bool = False) -> npt.NDArray[np.float64]:
    """The common model's loss after each round."""
    task = Task(0)
    x, y = (np.concatenate(parts) for parts in zip(*task.clusters, strict=True))
    halves = np.array_split(np.random.default_rng(0).permutation(len(y)), 2)
    codec: Codec = codec_from_spec(spec)
    links = meet(*NAMES, chunk_bytes=1 << 16)
    work = {}
    for seed, (name, half) in enumerate(zip(NAMES, halves, strict=True)):
        cluster = Cluster(links[name], codec if codec.lossless else ErrorFeedback(codec, decay), keep_unsent)
        work[name] = lambda c=cluster, h=half, s=seed: c.train(task, x[h], y[h], s)
    outcomes = at_once(work)
    assert outcomes["amber"] == outcomes["birch"], outcomes
    return np.array(outcomes["amber"])


def swing(curve: npt.NDArray[np.float64]) -> float:
    """From one round to the next."""
    return float(np.mean(np.abs(np.diff(curve))))


def test_errors_that_wait_long_make_the_loss_swing_unless_they_are_kept_or_forgotten() -> None:
    curves = {
        "dense": losses("fp32"),
        "once in 120 steps": losses("topk:32/256,2bit"),
        "once in 960": losses("topk:4/256,2bit"),
        "forgotten": losses("topk:4/256,2bit", 0.8),
        "kept": losses("topk:4/256,2bit", keep_unsent=True),
    }
    late = {name: curve[2 * len(curve) // 3 :] for name, curve in curves.items()}
    levels = {name: float(curve.mean()) for name, curve in late.items()}
    swings = {name: swing(curve) for name, curve in late.items()}
    levels["kept"] = float(curves["kept"][-1])  # the last round brings what the common model has lacked until then
    stale = "once in 960"
    assert all(levels[stale] > 1.4 * levels[name] for name in levels if name != stale), levels
    assert all(swings[stale] > 1.5 * swings[name] for name in swings if name != stale), swings
    assert max(levels["once in 120 steps"], levels["kept"]) < 1.15 * levels["dense"], levels
