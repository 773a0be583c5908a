"""What local steps must come to: one process trains a model per cluster, and averages them by hand.

Nothing of the plugin is used. A spec's ``rounds`` are the steps after which the models are averaged, its ``weights``
those of the clusters (equal ones by default), and its ``fragments`` lists of parameter names, of which each round
takes the next (by default all at once); ``last`` is the step to end with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from models import build
from paddlenlp.trainer import Trainer
from worker import Stream, kind_of, merged, optimizer_state, stack, training_arguments, write_parameters


class Model:
    """One cluster's model with the optimizer, the schedule and the data that its Trainer would have."""

    def __init__(self, spec: dict, cluster: str) -> None:
        spec = merged(spec, cluster)
        paddle.seed(7)
        self.model = build(spec["model"])
        self.batch = spec.get("batch", 4)
        self.accumulation = spec.get("train", {}).get("gradient_accumulation_steps", 1)
        with tempfile.TemporaryDirectory() as folder:
            arguments = training_arguments(spec, folder, self.batch)
            trainer = Trainer(model=self.model, args=arguments)
        trainer.create_optimizer_and_scheduler(arguments.max_steps)
        self.optimizer, self.scheduler = trainer.optimizer, trainer.lr_scheduler
        self.data = iter(Stream(kind_of(spec), {cluster: self.batch}, [cluster], spec.get("length", {})))
        self.rates: list[float] = []
        self.model.train()

    def step(self) -> None:
        """An optimizer step."""
        for _ in range(self.accumulation):
            items = stack([next(self.data) for _ in range(self.batch)])
            loss = self.model(**{key: paddle.to_tensor(value) for key, value in items.items()})
            loss = loss[0] if isinstance(loss, tuple) else loss
            (loss / self.accumulation).backward()
        self.rates.append(self.optimizer.get_lr())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.clear_grad()

    def parameters(self) -> dict[str, Any]:
        """What travels: running statistics are no part of it."""
        return {name: p for name, p in self.model.named_parameters() if not p.stop_gradient and "norm._" not in name}


class Outer:
    """Paddle's own optimizer on the averaged parameters."""

    def __init__(self, nebula: dict, start: dict[str, Any]) -> None:
        self._at = {name: paddle.create_parameter(p.shape, "float32") for name, p in start.items()}
        for name, p in start.items():
            self._at[name].set_value(p.detach())
        lr, momentum = nebula.get("sync_outer_lr", 1.0), nebula.get("sync_outer_momentum", 0.0)
        nesterov = nebula.get("sync_outer") == "nesterov"
        self._optimizer = paddle.optimizer.Momentum(lr, momentum, list(self._at.values()), use_nesterov=nesterov)

    def step(self, means: dict[str, np.ndarray]) -> dict[str, Any]:
        """The parameters that all clusters go on from."""
        for name, mean in means.items():
            self._at[name].grad = self._at[name].detach() - paddle.to_tensor(mean)
        self._optimizer.step()
        self._optimizer.clear_grad(set_to_zero=False)
        return {name: self._at[name] for name in means}


def run(spec: dict, out: Path) -> dict:
    """Train; writes NAME.CLUSTER-reference.r0.npz for each cluster and returns each one's rates and moments."""
    models = {cluster: Model(spec, cluster) for cluster in spec["clusters"]}
    weights = np.array([spec.get("weights", {}).get(cluster, 1.0) for cluster in models], dtype=np.float64)
    weights /= weights.sum()
    selected = {cluster: model.parameters() for cluster, model in models.items()}
    first = next(iter(selected.values()))
    outer = Outer(spec.get("nebula", {}), first)
    fragments = spec.get("fragments", [list(first)])
    taken = 0
    steps = spec["train"]["max_steps"]
    for step in range(1, spec.get("last", steps) + 1):
        for model in models.values():
            model.step()
        if step in spec["rounds"]:
            names = list(first) if step == steps else fragments[taken % len(fragments)]
            taken += 1
            means = {
                name: sum(
                    w * p[name].numpy().astype(np.float64) for w, p in zip(weights, selected.values(), strict=True)
                )
                for name in names
            }
            for name, value in outer.step({name: mean.astype(np.float32) for name, mean in means.items()}).items():
                for parameters in selected.values():
                    parameters[name].set_value(value.detach())
    for cluster, model in models.items():
        write_parameters(model.model, out / f"{spec['name']}.{cluster}-reference.r0.npz")
        state = optimizer_state(model.model, model.optimizer)
        np.savez(out / f"{spec['name']}.{cluster}-reference.r0.state.npz", **state)
    return {"rates": {cluster: model.rates for cluster, model in models.items()}}
