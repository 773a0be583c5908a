"""What a faults test trains: a tiny model, at a measured pace, going wrong when told to.

``trainee.py --steps 30 --fault raise@10``; the cluster's name and the rest come from NEBULA_* variables.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.trainer_utils import get_last_checkpoint

from paddlenlp_nebula import NebulaArguments, NebulaCallback, NebulaTrainer


class Numbers(paddle.io.Dataset):
    """Vectors and whether their sum is positive."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._x = np.random.RandomState(0).randn(count, 16).astype("float32")

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._x[index], "labels": np.int64(self._x[index].sum() > 0)}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch, in NumPy: Paddle's operators crash in a forked data worker."""
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}


class Model(paddle.nn.Layer):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(16, width)
        self.second = paddle.nn.Linear(width, 2)
        self.spoilt = False

    def forward(self, x: Any, labels: Any = None) -> tuple[Any, Any]:
        scores = self.second(paddle.nn.functional.relu(self.first(x)))
        loss = paddle.nn.functional.cross_entropy(scores, labels)
        return (loss * float("nan") if self.spoilt else loss), scores


class Fault(TrainerCallback):
    """Paces the steps, says which one it is, and does ``what`` at step ``when``."""

    def __init__(self, pace_s: float, fault: str, model: Model) -> None:
        self._pace_s = pace_s
        self._what, _, when = fault.partition("@")
        self._when = int(when or 0)
        self._model = model

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.stdout.write(f"step {state.global_step} at {time.time():.3f}\n")
        sys.stdout.flush()
        if state.global_step == self._when:
            self._go_wrong()
        time.sleep(self._pace_s)

    def _go_wrong(self) -> None:
        if self._what == "raise":
            raise KeyError("no such column: labels")
        if self._what == "nan":
            self._model.spoilt = True
        elif self._what.startswith("stall"):
            time.sleep(float(self._what.removeprefix("stall")))
        elif self._what == "exit":
            sys.exit(7)
        else:
            os.kill(os.getpid(), getattr(signal, self._what))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--fault", default="")
    parser.add_argument("--trainer", choices=("nebula", "plain"), default="nebula")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--on-loss", default="continue")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", choices=("no", "steps"), default="no")
    parser.add_argument("--save-steps", type=int, default=1000)
    parser.add_argument("--strategy", default="every_step")
    parser.add_argument("--every", default=None)
    options = parser.parse_args(argv)

    nebula = NebulaArguments(
        sync_timeout_s=options.timeout,
        sync_on_loss=options.on_loss,
        sync_codec=options.codec,
        sync_strategy=options.strategy,
        **({} if options.every is None else {"sync_every": options.every}),
    )
    paddle.seed(3)
    model = Model(options.width)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=options.learning_rate,
        device="cpu",
        logging_steps=1,
        save_strategy=options.save,
        save_steps=options.save_steps,
        save_total_limit=2,
        disable_tqdm=True,
        dataloader_num_workers=options.workers,
    )
    parts = {
        "model": model,
        "args": arguments,
        "train_dataset": Numbers(4096),
        "data_collator": collate,
        "callbacks": [Fault(options.pace, options.fault, model)],
    }
    if options.trainer == "nebula":
        saved = get_last_checkpoint("out") if os.path.isdir("out") else None  # of an earlier life
        NebulaTrainer(**parts, nebula_args=nebula).train(resume_from_checkpoint=saved)
    else:
        parts["callbacks"].insert(0, NebulaCallback(nebula))
        Trainer(**parts).train()
    sys.stdout.write("the script has ended\n")


if __name__ == "__main__":
    main(sys.argv[1:])
