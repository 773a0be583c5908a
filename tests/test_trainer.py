"""NebulaTrainer's choice of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_nebula.trainer import _checkpoints, _step_of

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
