"""NebulaTrainer's choice of a checkpoint, and what one cluster alone does with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
from paddle.io import Dataset
from paddle.utils import unique_name
from paddlenlp.trainer import TrainingArguments

from paddlenlp_nebula import NebulaArguments, NebulaTrainer
from paddlenlp_nebula.trainer import _checkpoints, _latest, _step_of

NEEDED = ["trainer_state.json", "scheduler.pdparams"]


def save(folder: Path, step: int, *files: str) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    for name in files:
        (checkpoint / name).touch()
    return checkpoint


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """A cluster killed while saving leaves the Trainer's state without the optimizer's."""
    whole = save(tmp_path, 10, *NEEDED)
    save(tmp_path, 20, "trainer_state.json")
    save(tmp_path, 30)
    (tmp_path / "checkpoint-best").mkdir()
    assert _checkpoints(tmp_path, NEEDED) == {10: whole}
    assert set(_checkpoints(tmp_path, NEEDED[:1])) == {10, 20}


def test_the_last_one_that_is_complete_is_resumed_from(tmp_path: Path) -> None:
    """Whatever ended the run while it wrote the last one."""
    assert _latest(tmp_path, NEEDED) is None
    unfinished = save(tmp_path, 20, "trainer_state.json")
    assert _latest(tmp_path, NEEDED) == str(unfinished)  # the Trainer says what it misses
    whole = save(tmp_path, 10, *NEEDED)
    assert _latest(tmp_path, NEEDED) == str(whole)
    last = save(tmp_path, 30, *NEEDED)
    assert _latest(tmp_path, NEEDED) == str(last)


def test_none_is_later_than_the_one_asked_for(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, *NEEDED)
    assert set(_checkpoints(tmp_path, NEEDED, latest=_step_of(tmp_path / "checkpoint-20"))) == {10, 20}


def test_the_step_is_in_the_name() -> None:
    assert [_step_of(path) for path in ("runs/checkpoint-20", "runs/checkpoint-20/", "runs/best", None)] == [
        20,
        20,
        None,
        None,
    ]


class Numbered(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.full(1, index, dtype=np.float32)}


class Witness(paddle.nn.Layer):
    """Remembers what it has been given in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.seen.append([int(number) for number in x.flatten()])
        return self.linear(x).square().mean()


def test_one_cluster_alone_resumes_in_the_order_of_the_first_epoch(tmp_path: Path) -> None:
    """PaddleNLP shuffles there by NumPy's random state, which must not be a later one before the epoch has begun."""

    def train(resume: str | None) -> list[list[int]]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            disable_tqdm=True,
            device="cpu",
        )
        solo = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
        with unique_name.guard():  # as in another process
            model = Witness()
            trainer = NebulaTrainer(model=model, args=arguments, train_dataset=Numbered(), nebula_args=solo)
            trainer.compute_loss = lambda model, inputs, return_outputs=False: model(**inputs)
            trainer.train(resume_from_checkpoint=resume)
        return model.seen

    whole = train(None)
    assert len({number for batch in whole for number in batch}) == 24
    assert train(str(tmp_path / "checkpoint-3")) == whole[3:]
