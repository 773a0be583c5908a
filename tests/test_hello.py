"""What must be equal at the start: the state of a resumed optimizer, whatever its process called its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddlenlp.trainer import TrainingArguments
from paddlenlp.trainer.trainer_callback import TrainerState

from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.hello import hello, optimizer_digest

from .models import Tied


def trained(steps: int = 3, gradient: float = 1.0) -> tuple[Any, Any]:
    """A model and its optimizer after some steps with constant gradients."""
    model = Tied()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=[p for p in model.parameters() if not p.stop_gradient])
    for _ in range(steps):
        for parameter in optimizer._parameter_list:
            parameter.grad = paddle.full(parameter.shape, gradient)
        optimizer.step()
    return model, optimizer


def test_the_same_state_under_other_counters() -> None:
    one, other = trained(), trained()
    assert one[1].state_dict().keys() != other[1].state_dict().keys()
    assert optimizer_digest(*one) == optimizer_digest(*other)
    assert optimizer_digest(*one) != optimizer_digest(*trained(steps=2))
    assert optimizer_digest(*one) != optimizer_digest(*trained(gradient=1.001))


def test_a_state_that_was_loaded_and_not_used_yet() -> None:
    model, optimizer = trained()
    fresh = paddle.optimizer.AdamW(1e-2, parameters=optimizer._parameter_list)
    before = optimizer_digest(model, fresh)
    fresh.set_state_dict(optimizer.state_dict())
    assert optimizer_digest(model, fresh) == optimizer_digest(model, optimizer) != before


@pytest.mark.parametrize("part", ["moment1", "moment2", "beta1_pow", "master_weights"])
def test_every_part_counts(part: str) -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    name = model.first.weight.name
    state = {**state, "master_weights": {name: paddle.ones([4, 4])}, "LR_Scheduler": {"last_epoch": 3}}
    stand_in = SimpleNamespace(state_dict=lambda: state)
    before = optimizer_digest(model, stand_in)
    tensor = state[part][name] if part == "master_weights" else next(state[key] for key in state if part in key)
    tensor.set_value(tensor + 1e-3)
    assert optimizer_digest(model, stand_in) != before
    assert list(state)[-2:] == ["master_weights", "LR_Scheduler"]  # the optimizer's own, left alone


def test_layers_whose_names_begin_alike() -> None:
    """linear_1 and linear_11: the state of one is not taken for the other's."""

    def digest(first: float, second: float) -> str | None:
        names = ["linear_1.w_0", "linear_1.w_0_moment1", "linear_11.w_0"]
        parameters = [(f"layer{number}", SimpleNamespace(name=name)) for number, name in enumerate(names)]
        state = {"linear_1.w_0_moment1_0": paddle.full([1], first), "linear_11.w_0_moment1_0": paddle.full([1], second)}
        model = SimpleNamespace(named_parameters=lambda: parameters)
        return optimizer_digest(model, SimpleNamespace(state_dict=lambda: state))

    assert digest(1.0, 2.0) != digest(2.0, 1.0)


def test_a_part_of_the_state_is_not_compared() -> None:
    """Sharding stage 1."""
    model, optimizer = trained()
    sharded = SimpleNamespace(_rank2params={0: []}, state_dict=optimizer.state_dict)
    assert optimizer_digest(model, SimpleNamespace(_inner_opt=sharded)) is None


@pytest.mark.parametrize(("step", "known"), [(0, False), (5, True)])
def test_the_schedule_counts_after_a_resume(step: int, known: bool, tmp_path: Any) -> None:
    scheduler = paddle.optimizer.lr.LambdaDecay(0.5, lambda epoch: 0.9**epoch)
    scheduler.step()
    state = TrainerState()
    state.global_step = step
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", report_to=[])
    solo = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
    found = hello(args, state, solo, None, scheduler)["lr_scheduler_state"]
    assert found == ('{"last_epoch": 1, "last_lr": 0.45}' if known else None)


def test_one_folder_under_two_names_is_one_folder(tmp_path: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    solo = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
    found = []
    for name in ("folder", "link"):
        args = TrainingArguments(output_dir=str(tmp_path / name), device="cpu", report_to=[])
        found.append(hello(args, TrainerState(), solo, None, None)["unique:output_dir"])
    assert found[0] == found[1]


def test_clusters_may_differ_in_their_backend(tmp_path: Any) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu", report_to=[])
    fields = [
        hello(args, TrainerState(), NebulaArguments("west", "west", "loopback", sync_backend=backend), None, None)
        for backend in ("auto", "host", "device")
    ]
    assert fields[0] == fields[1] == fields[2]
