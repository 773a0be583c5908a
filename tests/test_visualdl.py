"""Our scalars are in the Trainer's own VisualDL run, and a checkpoint holds the loss curve up to its step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.scalars import scalars


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one cluster that trains by itself, with a NebulaTrainer that knows nothing of VisualDL."""
    import paddle
    from paddlenlp.trainer import TrainingArguments

    from paddlenlp_nebula import NebulaArguments, NebulaTrainer

    class Points(paddle.io.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"x": np.full(4, index, dtype="float32"), "labels": np.array(index % 2)}

    class Model(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = paddle.nn.Linear(4, 2)

        def forward(self, x: object, labels: object = None) -> object:
            logits = self.layer(x)
            return paddle.nn.functional.cross_entropy(logits, labels), logits

    folder = tmp_path_factory.mktemp("run")
    training = TrainingArguments(
        output_dir=str(folder),
        logging_dir=str(folder / "visualdl"),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=2,
        device="cpu",
        disable_tqdm=True,
    )
    nebula = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
    NebulaTrainer(model=Model(), args=training, train_dataset=Points(), nebula_args=nebula).train()
    return folder


def test_scalars_are_read_back_with_visualdl(run: Path) -> None:
    curves = scalars(run / "visualdl")  # in the only file there: the Trainer's, not one of our own
    # The Trainer logs its last step twice, the second time with the mean loss.
    assert [step for step, _ in curves["loss"]] == [1, 2, 3, 4]
    for name in ("nebula_rounds", "nebula_members", "nebula_mb_sent", "nebula_utilisation"):
        assert [step for step, _ in curves[name]] == [1, 2, 3, 4, 4]
    assert {value for _, value in curves["nebula_members"]} == {1.0}
    assert {value for _, value in curves["nebula_mb_sent"]} == {0.0}  # alone; the notebook's test has two clusters
    assert all(0 < value <= 1 for _, value in curves["nebula_utilisation"])


def test_a_checkpoint_holds_the_losses_up_to_its_step(run: Path) -> None:
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert [step for step, _ in state["trial_params"]["nebula"]["ledger"]["losses"]] == [1, 2]
    report = json.loads((run / "nebula_report.json").read_text())
    assert [step for step, _ in report["losses"]] == [1, 2, 3, 4]
