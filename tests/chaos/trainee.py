"""What trains while things break: a student of a noisy teacher, small enough that the links are the bottleneck.

``trainee.py --steps 300 --strategy local_steps``; the cluster's name and the rest come from NEBULA_* variables. It
always resumes from its last checkpoint, as a scheduler's restart would. It leaves behind ``progress`` (JSON, rewritten
at every step), ``final.json`` (its model's loss on data that nobody trains on), and on SIGUSR1 its threads' stacks in
``stacks``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddlenlp.trainer import TrainerCallback, TrainingArguments

from paddlenlp_nebula import NebulaArguments, NebulaTrainer

_FEATURES, _CLASSES, _HIDDEN = 32, 8, 160
_TRAIN, _HELD_OUT = 1 << 16, 1 << 12


class Answers(paddle.io.Dataset):
    """Vectors and the class that a fixed random network gives them, by lot: no student can be sure of it."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        teacher, pupil = np.random.RandomState(0), np.random.RandomState(seed)
        first = teacher.randn(_FEATURES, 64) / np.sqrt(_FEATURES)
        second = teacher.randn(64, _CLASSES)
        self.x = pupil.randn(count, _FEATURES).astype("float32")
        scores = np.maximum(self.x @ first, 0) @ second / 2 + pupil.gumbel(size=(count, _CLASSES))
        self.labels = scores.argmax(axis=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": np.int64(self.labels[index])}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}


class Student(paddle.nn.Layer):
    """Three layers, 33,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (_FEATURES, _HIDDEN, _HIDDEN, _CLASSES)
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(into, out) for into, out in pairwise(widths)])

    def forward(self, x: Any, labels: Any = None) -> tuple[Any, Any]:
        for layer in self.layers[:-1]:
            x = paddle.nn.functional.relu(layer(x))
        scores = self.layers[-1](x)
        return paddle.nn.functional.cross_entropy(scores, labels), scores


class Pace(TrainerCallback):
    """Makes a step last as long as that of a larger model, and says where it is."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._taken = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._taken += 1  # a cluster that comes back goes on at the others' step
        note(step=state.global_step, taken=self._taken)
        time.sleep(self._pace_s)


def note(**progress: float) -> None:
    partial = Path("progress.new")
    partial.write_text(json.dumps({**progress, "pid": os.getpid()}))
    partial.replace("progress")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--every", default="30")
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-steps", type=int, default=20)
    options = parser.parse_args(argv)

    faulthandler.register(
        signal.SIGUSR1, file=os.open("stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND), all_threads=True
    )
    nebula = NebulaArguments(
        sync_timeout_s=options.timeout,
        sync_strategy=options.strategy,
        sync_every=options.every,
        sync_codec=options.codec,
    )
    paddle.seed(options.seed)
    model = Student()
    trainer = NebulaTrainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            seed=options.seed,
            max_steps=options.steps,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="linear",
            device="cpu",
            logging_steps=2,
            save_steps=options.save_steps,
            disable_tqdm=True,
        ),
        train_dataset=Answers(1, _TRAIN),
        data_collator=collate,
        callbacks=[Pace(options.pace)],
        nebula_args=nebula,
    )
    trainer.train(resume_from_checkpoint=True)
    held_out = Answers(2, _HELD_OUT)
    model.eval()
    with paddle.no_grad():
        loss, _ = model(paddle.to_tensor(held_out.x), paddle.to_tensor(held_out.labels))
    Path("final.json").write_text(json.dumps({"loss": float(loss), "steps": trainer.state.global_step}))
    sys.stdout.write("the script has ended\n")


if __name__ == "__main__":
    main(sys.argv[1:])
