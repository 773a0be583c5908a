"""West keeps its vectors on the host, east in tensors: the same bits after every round, saved, killed and resumed too."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from jobs import Outcome, run_forked
from models import build

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60, func_only=True)]  # runs have limits of their own

BOTH = ("west", "east")
LOCAL = {"sync_strategy": "local_steps", "sync_every": "2"}
NESTEROV = {**LOCAL, "sync_outer": "nesterov", "sync_outer_lr": 0.7, "sync_outer_momentum": 0.9}
SETTINGS = {
    "every_step-fp32": {"sync_codec": "fp32"},
    "every_step-int8": {"sync_codec": "int8"},
    "every_step-topk": {"sync_codec": "topk:8/64,2bit"},
    "every_step-lowrank": {"sync_codec": "lowrank:2"},
    "every_step-dgc": {"sync_codec": "dgc:0.05"},
    "local_steps-fp32": {**NESTEROV, "sync_codec": "fp32"},
    "local_steps-int8": {**NESTEROV, "sync_codec": "int8"},
    "local_steps-topk": {**LOCAL, "sync_codec": "topk:8/64,2bit", "sync_feedback_decay": 0.95},
    "local_steps-lowrank": {**LOCAL, "sync_codec": "lowrank:2"},
    "local_steps-unsent": {**LOCAL, "sync_codec": "topk:8/64,2bit", "sync_keep_unsent": True},
    "local_steps-fragments": {**LOCAL, "sync_every": "4", "sync_fragments": 2, "sync_codec": "bf16"},
}
SAME_PAYLOADS = [name for name in SETTINGS if name.endswith(("fp32", "int8", "fragments"))]
"""Where the backends write the same bytes, but for ties in int8."""
OTHER_PAYLOADS = [name for name in SETTINGS if name.endswith(("topk", "lowrank"))]
SAVED, STEPS = 3, 8  # between two rounds of local steps
HALF = {"model": "mlp-half", "optimizer": "masters", "train": {"max_steps": STEPS, "learning_rate": 1e-2}}
LORA = {"model": "lora", "train": {"max_steps": STEPS, "learning_rate": 1e-2}}


def _spec(name: str, kind: str, nebula: dict, backends: tuple[str, str] = ("host", "device"), **more) -> dict:
    per_cluster = {
        cluster: {"nebula": {**nebula, "sync_backend": backend}}
        for cluster, backend in zip(BOTH, backends, strict=True)
    }
    optimizer = "sgd" if "dgc" in name else "adamw"
    train = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    common = {"model": "mlp-dropout", "batch": 2, "nebula": nebula, "optimizer": optimizer, "train": train}
    return {**common, "per_cluster": per_cluster, "name": f"{name}-{kind}", **more}


def _cases() -> list[list[dict]]:
    cases = []
    for name, nebula in SETTINGS.items():
        output = f"{name}-stopped"
        cases += [
            [_spec(name, "whole", nebula)],
            [
                _spec(name, "killed", nebula, output=output, kill_at=SAVED + 1),
                _spec(name, "resumed", nebula, output=output, resume=SAVED),
            ],
        ]
    cases += [[_spec(name, "hosts", SETTINGS[name], ("host", "auto"))] for name in SAME_PAYLOADS + OTHER_PAYLOADS]
    for name, model, nebula in [
        ("half", HALF, {**LOCAL, "sync_codec": "bf16"}),
        ("lora", LORA, {"sync_parameters": "adapters"}),
    ]:
        cases += [
            [_spec(name, "whole", nebula, **model)],
            [_spec(name, "hosts", nebula, ("host", "auto"), **model)],
        ]
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs."""
    folder = tmp_path_factory.mktemp("backends")
    run_forked(_cases(), folder)
    return folder


def _both(folder, name: str) -> list[Outcome]:
    outcomes = [Outcome(folder, name, cluster) for cluster in BOTH]
    assert [outcome.error for outcome in outcomes] == [None, None]
    return outcomes


def _digests(outcome: Outcome) -> list[tuple[int, str]]:
    return [(entry["step"], entry["digest"]) for entry in outcome.report["per_round"]]


@pytest.mark.parametrize("name", [*SETTINGS, "half", "lora"])
def test_unlike_backends_hold_the_same_parameters_after_every_round(folder, name):
    west, east = _both(folder, f"{name}-whole")
    assert (west.report["backend"], east.report["backend"]) == ("host", "device")
    assert _digests(west) == _digests(east)
    assert len({digest for _, digest in _digests(west)}) == len(_digests(west)) >= 4
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    assert west.distance(east) == 0.0
    assert west.report["degradations"] == east.report["degradations"] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_equals_uninterrupted_on_both_backends(folder, name):
    for cluster in BOTH:
        whole, resumed = (Outcome(folder, f"{name}-{kind}", cluster) for kind in ("whole", "resumed"))
        assert (whole.error, resumed.error) == (None, None)
        assert resumed.result["losses"] == whole.result["losses"][SAVED:]
        assert whole.distance(resumed) == 0.0
        rounds = _digests(resumed)
        assert rounds == _digests(whole)[-len(rounds) :]
        for counter in ("rounds", "steps", "parameter_digest", "degradations", "backend"):
            assert whole.report[counter] == resumed.report[counter], counter
        assert whole.report["bytes_by_kind"]["BUCKET"] == resumed.report["bytes_by_kind"]["BUCKET"]


@pytest.mark.parametrize("name", [*SAME_PAYLOADS, "half", "lora"])
def test_with_the_same_payloads_a_device_gives_what_hosts_give(folder, name):
    mixed, hosts = _both(folder, f"{name}-whole")[1], _both(folder, f"{name}-hosts")[1]
    assert hosts.report["backend"] == "host"  # "auto", on a CPU
    assert mixed.result["losses"] == hosts.result["losses"]
    assert mixed.distance(hosts) == 0.0


@pytest.mark.parametrize("name", OTHER_PAYLOADS)
def test_with_other_payloads_it_comes_close(folder, name):
    paddle.seed(7)
    start = [parameter.numpy() for parameter in build("mlp-dropout").parameters()]
    mixed, hosts = _both(folder, f"{name}-whole")[1], _both(folder, f"{name}-hosts")[1]
    moved = max(float(np.abs(a - b).max()) for a, b in zip(start, hosts.parameters.values(), strict=True))
    assert mixed.distance(hosts) < 0.1 * moved
