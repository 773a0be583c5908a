"""Three clusters, one cluster alone, and several processes in a cluster, against plain jobs."""

from __future__ import annotations

import pytest
from jobs import Outcome, run_clusters, run_reference

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(280, func_only=True)]  # runs have limits of their own

THREE = ("west", "east", "north")
SPECS = [
    {"name": "full", "model": "mlp"},
    {
        "name": "full-accumulation-clipping",
        "model": "mlp",
        "train": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    },
    {"name": "unequal", "model": "mlp", "per_cluster": {"west": {"batch": 8}, "north": {"batch": 2}}},
    {
        "name": "lora-accumulation-clipping",
        "model": "lora",
        "nebula": {"sync_parameters": "adapters"},
        "train": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "learning_rate": 1e-3},
    },
]
DATA_PARALLEL = [
    *SPECS[:2],
    SPECS[3],
    {"name": "device", "model": "mlp", "per_cluster": {"east": {"nebula": {"sync_backend": "device"}}}},
    {"name": "master-grad", "model": "llama", "train": {"bf16": True, "amp_master_grad": True, "learning_rate": 1e-3}},
    {"name": "early-stopping", "model": "mlp", "eval_items": 8, "patience": 1, "train": {
        "max_steps": 40, "learning_rate": 0.2, "evaluation_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}},
]  # fmt: skip
SHARDED = [
    {"name": "stage1", "model": "llama", "train": {"sharding": "stage1", "learning_rate": 1e-3}},
    {
        "name": "stage1-lora",
        "model": "lora",
        "train": {"sharding": "stage1", "learning_rate": 1e-3},
        "nebula": {"sync_parameters": "adapters"},
    },
]
# One of two clusters ends early: the step that the other one has begun moves nothing, neither by momentum nor by decay.
STOPPED = [
    {
        "name": "stage1-stopped",
        "model": "llama",
        "train": {"sharding": "stage1", "learning_rate": 1e-3, "weight_decay": 0.1},
        "per_cluster": {"east": {"stop_at": 3}},
    }
]
ALONE = [
    {"name": "alone", "model": "mlp-dropout", "items": 24},
    {"name": "alone-lora", "model": "lora", "train": {"gradient_accumulation_steps": 2}},
]


def _without_sharding(spec):
    return {**spec, "train": {k: v for k, v in spec.get("train", {}).items() if k != "sharding"}}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three clusters of one process."""
    folder = tmp_path_factory.mktemp("three")
    run_reference(SPECS, folder, THREE)
    run_clusters(SPECS, folder, THREE)
    return folder


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """Two clusters of two processes each."""
    folder = tmp_path_factory.mktemp("parallel")
    run_reference([*DATA_PARALLEL, *map(_without_sharding, SHARDED)], folder)
    run_clusters(DATA_PARALLEL, folder, processes=2)
    run_clusters([*SHARDED, *STOPPED], folder, processes=2)  # fleet is initialised once per process
    return folder


@pytest.mark.parametrize("name", [spec["name"] for spec in SPECS])
def test_three_clusters_are_one_job(three, name):
    outcomes = [Outcome(three, name, cluster) for cluster in THREE]
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].distance(Outcome(three, name, "reference")) <= 1e-5
    assert outcomes[0].distance(outcomes[1]) == outcomes[0].distance(outcomes[2]) == 0.0


@pytest.mark.parametrize("name", [spec["name"] for spec in [*DATA_PARALLEL, *SHARDED]])
def test_two_processes_per_cluster_are_one_job(parallel, name):
    outcomes = [Outcome(parallel, name, cluster, rank) for cluster in ("west", "east") for rank in (0, 1)]
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcomes[0].distance(other) for other in outcomes[1:]] == [0.0] * 3
    if name not in ("master-grad", "early-stopping"):  # bf16 rounds differently; metrics are means over clusters
        assert outcomes[0].distance(Outcome(parallel, name, "reference")) <= 1e-5


def test_a_step_that_the_others_do_not_take_moves_nothing_under_sharding(parallel):
    outcomes = [Outcome(parallel, "stage1-stopped", cluster, rank) for cluster in ("west", "east") for rank in (0, 1)]
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.result["steps"] for outcome in outcomes] == [3] * 4
    assert [outcomes[0].distance(other) for other in outcomes[1:]] == [0.0] * 3


def test_one_cluster_alone_is_bit_equal_to_no_plugin(tmp_path):
    specs = [spec for case in ALONE for spec in (case, {**case, "name": case["name"] + "-plain", "trainer": "plain"})]
    run_clusters(specs, tmp_path, ("west",))
    for case in ALONE:
        mine, plain = Outcome(tmp_path, case["name"], "west"), Outcome(tmp_path, case["name"] + "-plain", "west")
        assert (mine.error, plain.error) == (None, None)
        assert mine.distance(plain) == 0.0
        assert mine.result["losses"] == plain.result["losses"]
        assert mine.report["bytes_sent"] == 0
