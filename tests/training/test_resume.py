"""Saved, killed and resumed is the same as never stopped, bit for bit, over real MPI."""

from __future__ import annotations

import shutil
from pathlib import Path

import paddle
import pytest
from jobs import Outcome, run_clusters, run_forked

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(280, func_only=True)]  # runs have limits of their own

_SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
_CASES = {
    "mlp-dropout": {
        "model": "mlp-dropout",
        "items": 40,
        "eval_items": 8,
        "nebula": {"sync_data": "shard"},
        "train": {**_SAVING, "evaluation_strategy": "steps", "eval_steps": 3},
    },
    "mlp-norm": {  # its running statistics are each cluster's own
        "model": "mlp-norm",
        "items": 40,
        "eval_items": 8,
        "nebula": {"sync_data": "shard"},
        "train": {**_SAVING, "evaluation_strategy": "steps", "eval_steps": 3},
    },
    "later-epoch": {  # of two steps
        "model": "mlp-dropout",
        "items": 16,
        "nebula": {"sync_data": "shard"},
        "train": _SAVING,
    },
    "epoch-end": {  # after three steps
        "model": "mlp-dropout",
        "items": 24,
        "nebula": {"sync_data": "shard"},
        "train": _SAVING,
    },
    "lora": {
        "model": "lora",
        "items": 64,
        "nebula": {"sync_data": "shard", "sync_parameters": "adapters", "sync_codec": "bf16"},
        "train": {**_SAVING, "gradient_accumulation_steps": 2},
    },
}


def _spoil_a_moment(checkpoint: Path) -> None:
    state = paddle.load(str(checkpoint / "optimizer.pdopt"))
    moment = state[next(key for key in state if "_moment1" in key)]
    moment.flatten_()[0] += 1e-6
    paddle.save(state, str(checkpoint / "optimizer.pdopt"))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def folder(request, tmp_path_factory):
    """The uninterrupted runs, the killed ones and the resumed ones."""
    folder = tmp_path_factory.mktemp(f"resume{request.param}")
    cases = _CASES if request.param == 1 else {"mlp-dropout": _CASES["mlp-dropout"]}
    whole = [{"name": f"{name}-whole", **case} for name, case in cases.items()]
    resumed = [
        {"name": f"{name}-resumed", "output": f"{name}-killed", "resume": 3, **case} for name, case in _CASES.items()
    ]
    apart = [
        # east resumes from step 3 while west starts anew or has another step: both hear of both
        {
            "name": "apart",
            "output": "mlp-dropout-whole",
            "per_cluster": {"west": {"resume": 3}, "east": {"resume": 6}},
            **_CASES["mlp-dropout"],
        },
        {
            "name": "common",
            "output": "mlp-dropout-killed",
            "resume": True,
            **_CASES["mlp-dropout"],
            "nebula": {"sync_data": "shard", "sync_resume": "common"},
        },
    ]
    apart[0]["train"] = {**_CASES["mlp-dropout"]["train"], "max_steps": 8}
    moments = {"name": "moments", "output": "moments", "resume": 3, **_CASES["mlp-dropout"]}
    killed = [{"name": f"{name}-killed", "kill_at": 4, **case} for name, case in cases.items()]
    if request.param == 1:
        run_forked([[spec] for spec in whole + killed], folder)
        shutil.copytree(folder / "mlp-dropout-killed", folder / "moments")
        _spoil_a_moment(folder / "moments" / "east" / "checkpoint-3")
        run_forked([[resumed[0], apart[1]], *([spec] for spec in [*resumed[1:], apart[0], moments])], folder)
    else:  # Paddle names optimizer state after a counter of layers, so a resumed model is its process' first
        for spec in [*whole, *killed, resumed[0]]:
            run_clusters([spec], folder, processes=request.param)
    return folder


@pytest.mark.parametrize("name", list(_CASES))
def test_resumed_equals_uninterrupted(folder, name):
    if not (folder / f"{name}-whole.west.r0.json").exists():
        pytest.skip("done with one process per cluster")
    for cluster in ("west", "east"):
        whole, resumed = Outcome(folder, f"{name}-whole", cluster), Outcome(folder, f"{name}-resumed", cluster)
        assert (whole.error, resumed.error) == (None, None)
        assert whole.distance(resumed) == 0.0
        told = ["BatchNorm's running statistics (norm._mean" in said for said in resumed.report["degradations"]]
        assert told == [True] * (name == "mlp-norm")
        assert resumed.result["losses"] == whole.result["losses"][3:]
        for counter in ("rounds", "steps", "samples", "tokens", "parameter_digest"):
            assert whole.report[counter] == resumed.report[counter], counter
        assert whole.report["bytes_by_kind"]["BUCKET"] == resumed.report["bytes_by_kind"]["BUCKET"]
        assert whole.report["per_round"][-1]["round"] == resumed.report["per_round"][-1]["round"]
        losses = [[e["eval_loss"] for e in outcome.result["evaluations"][-1:]] for outcome in (whole, resumed)]
        assert losses[0] == losses[1]


def test_different_steps_are_refused_or_the_common_one_is_taken(folder):
    if not (folder / "apart.west.r0.json").exists():
        pytest.skip("done with one process per cluster")
    errors = [Outcome(folder, "apart", cluster).error for cluster in ("west", "east")]
    assert errors[0] == errors[1]
    assert "global_step=3" in errors[0]
    assert "global_step=6" in errors[0]
    for cluster in ("west", "east"):
        common = Outcome(folder, "common", cluster)
        assert common.error is None
        assert common.distance(Outcome(folder, "mlp-dropout-whole", cluster)) == 0.0


def test_another_optimizer_state_is_refused_before_anything_is_trained(folder):
    """Parameters, steps and settings are equal, one element of a moment is not."""
    if not (folder / "moments.west.r0.json").exists():
        pytest.skip("done with one process per cluster")
    errors = [Outcome(folder, "moments", cluster).error for cluster in ("west", "east")]
    assert errors[0] == errors[1]
    assert errors[0].startswith("HandshakeError")
    assert "cluster 'west' has optimizer_state=" in errors[0]
    assert "their checkpoints are not of one run" in errors[0]
    assert "lr_scheduler_state" not in errors[0]
