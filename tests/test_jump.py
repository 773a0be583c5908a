"""The Trainer's counters after a return: a schedule that follows the time, losses by the steps that were taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from paddlenlp_nebula.jump import follow


def standing(step: int) -> tuple[Any, Any]:
    """A TrainerState that has just taken a step, not yet counted, and its schedule."""
    scheduler = paddle.optimizer.lr.LambdaDecay(1.0, lambda done: 1 - done / 100)
    for _ in range(step):
        scheduler.step()
    return SimpleNamespace(global_step=step - 1, best_model_checkpoint=None, best_metric=None), scheduler


@pytest.mark.parametrize("step", [12, 40])
def test_the_schedule_and_the_counter_follow(step: int) -> None:
    state, scheduler = standing(10)
    skipped: list[int] = []
    assert list(follow(step, 10, state, scheduler, skipped.append)) == []
    assert state.global_step == step - 1  # the Trainer is about to count one
    assert skipped == [step - 10]
    assert scheduler() == pytest.approx(1 - step / 100)
    scheduler.step()
    assert scheduler() == pytest.approx(1 - (step + 1) / 100)


def test_who_is_there_already_stays() -> None:
    state, scheduler = standing(10)
    assert list(follow(10, 10, state, scheduler, None)) == []
    assert state.global_step == 9
    assert scheduler() == pytest.approx(0.9)


def test_what_nobody_can_correct_is_said() -> None:
    state, scheduler = standing(10)
    state.best_model_checkpoint, state.best_metric = "out/checkpoint-5", 0.5
    best, losses = follow(15, 10, state, scheduler, None)
    assert "out/checkpoint-5 is no longer the best model" in best
    assert losses.startswith("steps 11 to 15 were taken by other clusters")
    assert state.best_model_checkpoint is None
