"""A step that is none, in the Trainer's own loop: everything is as after the step before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments

from paddlenlp_nebula.void_step import VoidStep

pytestmark = pytest.mark.timeout(60)


class Numbers(paddle.io.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.RandomState(index)
        return {"x": random.randn(8).astype("float32"), "labels": np.int64(random.randint(2))}


class Model(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = paddle.nn.Linear(8, 2)

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.layer(x)
        return paddle.nn.functional.cross_entropy(logits, labels), logits


class Void(TrainerCallback):  # type: ignore[misc]
    """Makes a step void, and remembers what there was before."""

    def __init__(self, step: int) -> None:
        self._at = step
        self._step: VoidStep | None = None
        self.before: dict[str, Any] = {}
        self.evaluated: list[int] = []

    def _look(self, state: Any, model: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
        tensors = {**dict(model.named_parameters()), **optimizer.state_dict()}
        schedule = tensors.pop("LR_Scheduler")
        return {
            "arrays": {name: tensor.numpy().copy() for name, tensor in tensors.items()},
            "schedule": (dict(schedule), lr_scheduler.state_dict(), optimizer.get_lr()),
            "state": (state.global_step, state.epoch, state.consumed_samples),
        }

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self._at:
            names = ("model", "optimizer", "lr_scheduler")
            self.before = self._look(state, *(kwargs[name] for name in names))
            self._step = VoidStep(state, kwargs["model"].parameters(), kwargs["lr_scheduler"])

    def on_optimizer_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None:
            self._step.after_optimizer(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None:
            self._step.after_step(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after = self._look(state, kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_nothing_has_happened(tmp_path: Path, clip: float, accumulation: int) -> None:
    model, void = Model(), Void(4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        device="cpu",
        max_steps=10,
        learning_rate=0.1,
        weight_decay=0.1,
        max_grad_norm=clip,
        gradient_accumulation_steps=accumulation,
        save_strategy="steps",
        save_steps=1,
        evaluation_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, args=arguments, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=[void])
    trainer.train()
    assert void.before["state"] == void.after["state"]
    assert void.before["schedule"] == void.after["schedule"]
    assert void.before["arrays"].keys() == void.after["arrays"].keys()
    for name, array in void.before["arrays"].items():
        assert (array == void.after["arrays"][name]).all(), name
    assert trainer.state.global_step == 3
    assert void.evaluated == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert (saved["global_step"], saved["epoch"]) == (3, void.after["state"][1])
