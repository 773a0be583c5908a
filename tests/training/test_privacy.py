"""Bounds, noise and secure aggregation in the Trainer, over real MPI and TLS."""

from __future__ import annotations

import json
import shutil

import dp_accounting
import pytest
from jobs import Outcome, run_forked, run_reference

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(280, func_only=True)]  # runs have limits of their own

TWO = ("west", "east")
THREE = (*TWO, "north")
LOCAL = {"sync_strategy": "local_steps", "sync_every": "2"}
NOISE = {"privacy_clip_norm": 0.1, "privacy_noise_multiplier": 2.0, "sync_weight": "equal", "sync_quorum": 2}
SECURE = {"privacy_secure_aggregation": True, "sync_quorum": 3}
SAVING = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}


def _spec(name: str, nebula: dict, clusters: tuple[str, ...] = TWO, max_steps: int = 6, **more) -> dict:
    train = {"max_steps": max_steps, **more.pop("train", {})}
    return {"name": name, "model": "mlp", "clusters": list(clusters), "nebula": nebula, "train": train, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("privacy")
    noisy_local = {**LOCAL, **NOISE}
    first = [
        _spec("plain", {}),
        _spec("wide-bound", {"privacy_clip_norm": 1e6}),
        _spec("bound", {"privacy_clip_norm": 0.1}, optimizer="sgd", train={"learning_rate": 1.0}, max_steps=1),
        _spec("noise", NOISE, items=24, items_owner="shared"),
        _spec("int8", {**NOISE, "sync_codec": "int8", "sync_error_feedback": False}),
        _spec("killed", noisy_local, train=SAVING, kill_at=7),
        _spec("secure", SECURE, THREE, optimizer="sgd", train={"learning_rate": 0.1}),
        _spec("both", {**LOCAL, **NOISE, **SECURE}, THREE),
    ]
    run_forked([[spec] for spec in first], folder, THREE)
    shutil.copytree(folder / "killed", folder / "spoilt")
    resumed = {"train": SAVING, "resume": 4}
    then = [
        _spec("resumed", noisy_local, output="killed", **resumed),
        _spec("missing", noisy_local, output="spoilt", spoil="missing", **resumed),
    ]
    run_forked([[spec] for spec in then], folder, THREE)
    run_reference([first[-2]], folder, THREE)
    return folder


def outcomes(folder, name: str, clusters: tuple[str, ...] = TWO) -> list[Outcome]:
    found = [Outcome(folder, name, cluster) for cluster in clusters]
    assert [outcome.error for outcome in found] == [None] * len(found)
    assert [found[0].distance(other) for other in found[1:]] == [0.0] * (len(found) - 1)
    assert not any(outcome.report["degradations"] for outcome in found)
    return found


def epsilon(multiplier: float, rounds: int) -> float:
    return dp_accounting.get_epsilon_gaussian(multiplier / rounds**0.5, 1e-5)


def test_a_bound_that_nothing_reaches_changes_nothing(folder):
    plain, bounded = outcomes(folder, "plain")[0], outcomes(folder, "wide-bound")[0]
    assert plain.distance(bounded) == 0.0
    assert bounded.report["privacy_clip_norm"] == 1e6
    assert all(0 < entry["update_norm"] < 1e6 for entry in bounded.report["per_round"])
    assert [entry["update_norm"] for entry in plain.report["per_round"]] == [None] * 6
    assert "privacy_epsilon" not in bounded.report


def test_a_bound_holds_for_the_step_of_all_parameters(folder):
    """Plain descent with rate 1 moves by the mean of two bounded gradients."""
    import numpy as np
    import paddle
    from models import build

    paddle.seed(7)
    start = [parameter.numpy().ravel() for parameter in build("mlp").parameters()]
    moved = [
        after.ravel() - before
        for after, before in zip(outcomes(folder, "bound")[0].parameters.values(), start, strict=True)
    ]
    assert 0 < np.linalg.norm(np.concatenate(moved)) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize(("name", "multiplier"), [("noise", 2.0), ("int8", 2.0 / 2**0.5)])
def test_the_report_has_the_epsilon_of_all_rounds(folder, name, multiplier):
    for outcome in outcomes(folder, name):
        report = outcome.report
        assert report["privacy_epsilon"] == pytest.approx(epsilon(multiplier, 6))
        assert report["privacy_epsilon_members"] == pytest.approx(epsilon(2.0 / 2**0.5, 6))
        assert (report["privacy_delta"], report["privacy_rounds"], report["rounds"]) == (1e-5, 6, 6)
        assert (report["privacy_clip_norm"], report["privacy_noise_multiplier"]) == (0.1, 2.0)


def test_no_hash_of_a_batch_is_sent_with_noise(folder):
    """Both have the same items, which they would tell each other otherwise."""
    assert not any("same first batch" in said for o in outcomes(folder, "noise") for said in o.report["degradations"])


def test_a_resumed_run_counts_the_rounds_that_its_checkpoint_does_not_know(folder):
    """Rounds after steps 2, 4 and 6, killed, resumed from step 4, rounds after steps 6 and 8."""
    for outcome in outcomes(folder, "resumed"):
        assert outcome.report["rounds"] == 4
        assert outcome.report["privacy_rounds"] == 5
        assert outcome.report["privacy_epsilon"] == pytest.approx(epsilon(2.0, 5))
    counted = json.loads((folder / "killed" / "west" / "nebula_privacy.json").read_text())
    assert counted["rounds"] == 5


def test_what_was_learned_since_a_round_is_not_given_away_by_a_resume(folder):
    for cluster in TWO:
        error = Outcome(folder, "missing", cluster).error
        assert error is not None
        assert "the checkpoint of step 4 must hold nebula_state.safetensors, got none" in error


def test_securely_aggregated_gradients_are_those_of_one_job(folder):
    found = outcomes(folder, "secure", THREE)
    assert found[0].distance(Outcome(folder, "secure", "reference")) <= 1e-5
    assert [outcome.report["privacy_secure_aggregation"] for outcome in found] == [True] * 3


def test_noise_and_masks_go_together(folder):
    for outcome in outcomes(folder, "both", THREE):
        assert outcome.report["privacy_rounds"] == 3
        assert outcome.report["privacy_epsilon"] == pytest.approx(epsilon(2.0, 3))
        assert outcome.report["privacy_epsilon_members"] == pytest.approx(epsilon(2.0 * (2 / 3) ** 0.5, 3))
        assert outcome.report["privacy_secure_aggregation"] is True
