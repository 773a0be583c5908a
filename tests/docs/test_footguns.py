"""What docs/footguns.md says of PaddleNLP is true of the version that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from paddlenlp.trainer import Trainer, TrainingArguments


class Numbers(paddle.io.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, paddle.Tensor]:
        return {"x": paddle.ones([3]), "labels": paddle.ones([1])}


class Model(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(3, 1)

    def forward(self, x: paddle.Tensor, labels: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        y = self.linear(x)
        return ((y - labels) ** 2).mean(), y


@pytest.mark.parametrize(("settings", "left"), [({}, [1, 2, 3]), ({"local_rank": 0}, [3])])
def test_old_checkpoints_are_removed_only_with_a_local_rank(
    tmp_path: Path, settings: dict[str, Any], left: list[int]
) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        device="cpu",
        max_steps=3,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    Trainer(model=Model(), args=args, train_dataset=Numbers()).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in left]


class Counted(Numbers):
    """Remembers what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, paddle.Tensor]:
        self.read.append(int(index))
        return super().__getitem__(index)


@pytest.mark.parametrize(("step", "exact"), [(1, True), (2, False), (3, False)])
def test_a_plain_trainers_resume_is_exact_within_the_first_epoch_only(tmp_path: Path, step: int, exact: bool) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        device="cpu",
        max_steps=4,  # two epochs of two
        save_steps=1,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
    )
    whole, resumed = Counted(), Counted()
    for data, checkpoint in ((whole, None), (resumed, str(tmp_path / f"checkpoint-{step}"))):
        with paddle.utils.unique_name.guard():  # as in a new process: moments are found by their names
            Trainer(model=Model(), args=args, train_dataset=data).train(resume_from_checkpoint=checkpoint)
    left = 8 * (4 - step)
    assert (whole.read[-left:] == resumed.read[-left:]) == exact
