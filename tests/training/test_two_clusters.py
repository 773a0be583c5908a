"""Two clusters over real MPI against one job on the concatenated batch, and against each other."""

from __future__ import annotations

import pytest
from jobs import Outcome, run_clusters, run_reference

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(280, func_only=True)]  # runs have limits of their own

EQUIVALENT = [
    {"name": "full", "model": "mlp"},
    {
        "name": "full-accumulation-clipping",
        "model": "mlp",
        "train": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    },
    {"name": "full-unequal-batches", "model": "mlp", "per_cluster": {"west": {"batch": 8}, "east": {"batch": 3}}},
    {"name": "full-no-clipping", "model": "mlp", "train": {"max_grad_norm": 0.0}},
    {"name": "unused", "model": "mlp-unused"},
    {"name": "tied", "model": "mlp-tied"},
    {"name": "frozen", "model": "mlp-frozen"},
    {"name": "callback", "model": "mlp", "trainer": "callback"},
    {"name": "llama", "model": "llama", "train": {"learning_rate": 1e-3}},
    {"name": "llama-tied", "model": "llama-tied", "train": {"learning_rate": 1e-3}},
    {"name": "recompute", "model": "llama-recompute", "train": {"learning_rate": 1e-3, "recompute": True}},
    {"name": "lora", "model": "lora", "nebula": {"sync_parameters": "adapters"}, "train": {"learning_rate": 1e-3}},
    {
        "name": "lora-accumulation-clipping",
        "model": "lora",
        "nebula": {"sync_parameters": "adapters"},
        "train": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "learning_rate": 1e-3},
    },
    {"name": "lokr", "model": "lokr", "nebula": {"sync_parameters": "adapters"}, "train": {"learning_rate": 1e-3}},
    {"name": "vera", "model": "vera-free", "nebula": {"sync_parameters": "adapters"}, "train": {"learning_rate": 1e-3}},
    {"name": "prefix", "model": "prefix", "nebula": {"sync_parameters": "adapters"}, "train": {"learning_rate": 1e-3}},
]
_SAVING = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1}
IDENTICAL = [
    {"name": "bf16-wire", "model": "mlp", "nebula": {"sync_codec": "bf16"}},
    {"name": "fp16-wire", "model": "mlp", "nebula": {"sync_codec": "fp16"}},
    {"name": "master-grad", "model": "llama", "train": {"bf16": True, "amp_master_grad": True, "learning_rate": 1e-3}},
    {"name": "zero-gradients", "model": "vera-zero", "nebula": {"sync_parameters": "adapters"}},
    {"name": "tokens", "model": "lora", "nebula": {"sync_weight": "tokens"}},
    {"name": "equal", "model": "mlp", "nebula": {"sync_weight": "equal"}, "per_cluster": {"west": {"batch": 8}}},
    {"name": "all", "model": "lora", "nebula": {"sync_parameters": "all"}},
    {"name": "dropout", "model": "mlp-dropout", "items": 16, "train": {"learning_rate": 0.0, "max_steps": 8}},
    {"name": "other-seeds", "model": "mlp", "per_cluster": {"west": {"seed": 1}, "east": {"seed": 2}}},
    {
        "name": "unequal-data",
        "model": "mlp",
        "per_cluster": {"west": {"items": 32, "items_owner": "w"}, "east": {"items": 20, "items_owner": "e"}},
        "train": {"max_steps": -1, "num_train_epochs": 2},
    },
    {"name": "shared-data", "model": "mlp", "items": 64, "nebula": {"sync_data": "shard"}},
    {"name": "iterable-shared", "model": "mlp", "nebula": {"sync_data": "shard"}},
    {"name": "stopped-first", "model": "mlp", "train": _SAVING, "per_cluster": {"west": {"stop_at": 3}}},
    {
        "name": "stopped-second",
        "model": "mlp",
        "trainer": "callback",
        "train": _SAVING,
        "per_cluster": {"east": {"stop_at": 3}},
    },
    {"name": "same-batch", "model": "mlp", "items": 16, "train": {"max_steps": 2}},
    {"name": "workers", "model": "mlp", "items": 64, "train": {"dataloader_num_workers": 2, "max_steps": 4}},
    {
        "name": "early-stopping",
        "model": "mlp",
        "eval_items": 12,
        "patience": 1,
        "train": {
            "max_steps": 40,
            "learning_rate": 0.2,
            "evaluation_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        },
    },
]
_SHARDED = {"model": "mlp", "items": 33, "nebula": {"sync_data": "shard"}}
REFUSED = [
    (
        {"name": "learning-rates", "model": "mlp", "per_cluster": {"east": {"train": {"learning_rate": 0.5}}}},
        "learning_rate",
    ),
    ({"name": "models", "model": "mlp", "per_cluster": {"east": {"model": "mlp-unused"}}}, "selection"),
    ({"name": "frozen-weights", "model": "lora", "per_cluster": {"east": {"seed": 3}}}, "frozen"),
    ({"name": "codecs", "model": "mlp", "per_cluster": {"east": {"nebula": {"sync_codec": "bf16"}}}}, "sync_codec"),
    ({"name": "betas", "model": "mlp", "per_cluster": {"east": {"train": {"adam_beta2": 0.9}}}}, "adam_beta2"),
    ({"name": "shard-seeds", **_SHARDED, "per_cluster": {"east": {"seed": 3}}}, "seed"),
    ({"name": "shard-lengths", **_SHARDED, "per_cluster": {"east": {"items": 20}}}, "dataset_length"),
    ({"name": "shard-and-own", **_SHARDED, "per_cluster": {"east": {"nebula": {"sync_data": "own"}}}}, "sync_data"),
    (
        {  # 17 and 16 samples: 5 and 4 steps
            "name": "epochs",
            **_SHARDED,
            "eval_items": 8,
            "train": {"max_steps": -1, "num_train_epochs": 2, "evaluation_strategy": "epoch"},
        },
        "evaluation",
    ),
    ({"name": "steps", "model": "mlp", "per_cluster": {"east": {"train": {"max_steps": 5}}}}, "max_steps"),
    (
        {"name": "initial", "model": "mlp", "nebula": {"sync_init": "verify"}, "per_cluster": {"east": {"seed": 3}}},
        "initial",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that trains, run once."""
    folder = tmp_path_factory.mktemp("two")
    run_reference(EQUIVALENT, folder)
    run_clusters([*EQUIVALENT, *IDENTICAL], folder, timeout_s=500)
    return folder


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Everything that is refused."""
    folder = tmp_path_factory.mktemp("refused")
    run_clusters([spec for spec, _ in REFUSED], folder)
    return folder


def _both(folder, name):
    west, east = Outcome(folder, name, "west"), Outcome(folder, name, "east")
    assert (west.error, east.error) == (None, None)
    return west, east


@pytest.mark.parametrize("name", [spec["name"] for spec in EQUIVALENT])
def test_equivalent_to_one_job_on_the_concatenated_batch(folder, name):
    west, east = _both(folder, name)
    assert west.distance(Outcome(folder, name, "reference")) <= 1e-5
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]


@pytest.mark.parametrize("name", [spec["name"] for spec in IDENTICAL])
def test_identical_on_both_clusters(folder, name):
    west, east = _both(folder, name)
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    assert west.report["rounds"] == west.report["steps"] > 0


@pytest.mark.parametrize(("name", "field"), [(spec["name"], field) for spec, field in REFUSED])
def test_refused_with_both_values_on_both_clusters(refused, name, field):
    errors = [Outcome(refused, name, cluster).error for cluster in ("west", "east")]
    assert errors[0] is not None
    assert errors[0] == errors[1]
    assert errors[0].startswith("HandshakeError")
    assert field in errors[0]
    assert "west" in errors[0]
    assert "east" in errors[0]


@pytest.mark.parametrize("name", ["full", "lora", "frozen", "llama-tied"])
def test_only_what_is_selected_travels(folder, name):
    west, _ = _both(folder, name)
    report = west.report
    gradients = report["bytes_by_kind"]["BUCKET"][0]
    payload = 4 * west.result["trainable"] * report["rounds"]
    assert report["parameters_selected"] == west.result["trainable"]
    assert report["link_mbit_s"] > 0
    assert payload < gradients <= 1.02 * payload + 44 * report["rounds"]


def test_clusters_of_one_seed_drop_out_different_units(folder):
    west, east = _both(folder, "dropout")  # the same parameters and the same batches
    assert all(mine != theirs for mine, theirs in zip(west.result["losses"], east.result["losses"], strict=True))


def test_unequal_data_takes_the_longest_plan(folder):
    west, east = _both(folder, "unequal-data")
    assert west.result["steps"] == east.result["steps"] == 16


def test_the_same_first_batch_is_noticed(folder):
    west, _ = _both(folder, "same-batch")
    assert any("same first batch" in sentence for sentence in west.report["degradations"])
    assert not any("same first batch" in s for s in _both(folder, "shared-data")[0].report["degradations"])


@pytest.mark.parametrize("name", ["stopped-first", "stopped-second"])
def test_a_cluster_that_stops_early_ends_the_training_of_all(folder, name):
    west, east = _both(folder, name)
    stopped, other = (west, east) if name == "stopped-first" else (east, west)
    assert (stopped.report["steps"], other.report["steps"]) == (3, 3)
    assert stopped.report["degradations"] == []
    assert len(other.report["degradations"]) == 2
    assert "ended training before step 4: everybody ends there" in other.report["degradations"][0]
    assert "step 4 was not taken, but train_loss counts its batch" in other.report["degradations"][1]
    for outcome, cluster in zip((west, east), ("west", "east"), strict=True):
        assert outcome.result["steps"] == 3
        assert len(outcome.result["losses"]) == 3
        kept = sorted(path.name for path in (folder / name / cluster).glob("checkpoint-*"))
        assert kept == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert {west.report["status"], east.report["status"]} == {"done"}


def test_early_stopping_and_best_model_agree(folder):
    west, east = _both(folder, "early-stopping")
    assert west.result["steps"] == east.result["steps"] < 40
    assert [e["eval_loss"] for e in west.result["evaluations"]] == [e["eval_loss"] for e in east.result["evaluations"]]
