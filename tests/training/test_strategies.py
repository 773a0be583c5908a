"""Every strategy with every codec over real MPI: clusters stay identical, and resumed is never stopped, bit for bit."""

from __future__ import annotations

import paddle
import pytest
from jobs import Outcome, run_forked

from paddlenlp_nebula.arguments import _CHOICES
from paddlenlp_nebula.codec.registry import CODECS
from paddlenlp_nebula.strategy.outer import OUTER

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60, func_only=True)]  # runs have limits of their own

LOCAL = {"sync_strategy": "local_steps", "sync_every": "2"}
STRATEGIES = {
    "every_step": {"sync_strategy": "every_step"},
    "average": LOCAL,
    "nesterov": {**LOCAL, "sync_outer": "nesterov", "sync_outer_lr": 0.7, "sync_outer_momentum": 0.9},
    "fragments": {**LOCAL, "sync_every": "4", "sync_fragments": 2},
    "growing": {**LOCAL, "sync_every": "1..4"},
    "decay": {**LOCAL, "sync_feedback_decay": 0.95, "sync_outer": "sgd", "sync_outer_lr": 0.9},
}
"""Each has a round after step 6 and none after step 9 (every_step: none but complete ones)."""
SPECS = [
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:64,stochastic",
    "int4",
    "int2",
    "sign",
    "topk:8/64,2bit",
    "lowrank:2",
    "randomk:0.5",
    "randomk:0.5+topk:8/64,4bit",
    "dgc:0.05",
]
ROUND, MIDDLE, STEPS = 6, 9, 12
CASES = [
    (strategy, codec) for strategy in STRATEGIES for codec in SPECS if strategy == "every_step" or codec != "dgc:0.05"
]
THREE = [(strategy, codec) for strategy in STRATEGIES for codec in ("fp32", "topk:8/64,2bit", "int8")]


def _saved(case: tuple[str, str]) -> int:
    """The step to resume from: at a round or in the middle, so that each strategy and each codec sees both."""
    strategy, codec = case
    return (ROUND, MIDDLE)[(list(STRATEGIES).index(strategy) + SPECS.index(codec)) % 2]


def _name(case: tuple[str, str]) -> str:
    return "-".join(case).replace("/", "_")


def _spec(case: tuple[str, str], kind: str, **more) -> dict:
    strategy, codec = case
    nebula = {**STRATEGIES[strategy], "sync_codec": codec}
    optimizer = "sgd" if codec.startswith("dgc") else "adamw"
    train = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3}
    common = {"model": "mlp-dropout", "batch": 2, "nebula": nebula, "optimizer": optimizer, "train": train}
    return {**common, "name": f"{_name(case)}-{kind}", **more}


def _stopped_and_resumed(case: tuple[str, str]) -> list[dict]:
    saved, output = _saved(case), f"{_name(case)}-stopped"
    killed = _spec(case, "killed", output=output, kill_at=saved + 1)
    return [killed, _spec(case, "resumed", output=output, resume=saved)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs of two clusters."""
    folder = tmp_path_factory.mktemp("strategies")
    run_forked([[_spec(case, "whole")] for case in CASES] + [_stopped_and_resumed(case) for case in CASES], folder)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Some runs of three clusters."""
    folder = tmp_path_factory.mktemp("three")
    run_forked([[_spec(case, "whole")] for case in THREE], folder, ("west", "east", "north"))
    return folder


def test_the_table_is_complete():
    assert {codec.partition(":")[0] for codec in SPECS} == set(CODECS)
    assert {nebula["sync_strategy"] for nebula in STRATEGIES.values()} == set(_CHOICES["sync_strategy"])
    assert {nebula.get("sync_outer", "average") for nebula in STRATEGIES.values()} == set(OUTER)
    for place in (ROUND, MIDDLE):
        there = [case for case in CASES if _saved(case) == place and case[0] != "every_step"]
        assert {strategy for strategy, _ in there} == set(STRATEGIES) - {"every_step"}
        assert {codec for _, codec in there} == set(SPECS) - {"dgc:0.05"}


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_clusters_are_identical(folder, case):
    west, east = (Outcome(folder, f"{_name(case)}-whole", cluster) for cluster in ("west", "east"))
    assert (west.error, east.error) == (None, None)
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    told = "sync_feedback_decay=0.95 has no effect: sync_codec='fp32' leaves nothing unsent"
    assert west.report["degradations"] == east.report["degradations"] == [told] * (case == ("decay", "fp32"))
    assert west.result["losses"] != east.result["losses"]
    steps = [entry["step"] for entry in west.report["per_round"]]
    assert ROUND in steps
    assert (MIDDLE in steps) == (case[0] == "every_step")


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_resumed_equals_uninterrupted(folder, case):
    for cluster in ("west", "east"):
        whole, resumed = (Outcome(folder, f"{_name(case)}-{kind}", cluster) for kind in ("whole", "resumed"))
        assert (whole.error, resumed.error) == (None, None)
        assert not (folder / f"{_name(case)}-killed.{cluster}.r0.json").exists()  # it had no time to write it
        assert resumed.result["losses"] == whole.result["losses"][_saved(case) :]
        assert whole.distance(resumed) == 0.0
        for counter in ("rounds", "steps", "samples", "tokens", "parameter_digest", "degradations"):
            assert whole.report[counter] == resumed.report[counter], counter
        assert whole.report["bytes_by_kind"]["BUCKET"] == resumed.report["bytes_by_kind"]["BUCKET"]


def test_in_the_middle_of_a_round_each_cluster_has_parameters_of_its_own(folder):
    weights = []
    for cluster in ("west", "east"):
        checkpoint = folder / f"{_name(('average', 'fp32'))}-whole" / cluster / f"checkpoint-{MIDDLE}"
        weights.append(paddle.load(str(checkpoint / "model_state.pdparams"))["first.weight"].numpy())
    assert abs(weights[0] - weights[1]).max() > 0


@pytest.mark.parametrize("case", THREE, ids=_name)
def test_three_clusters_are_identical(three, case):
    outcomes = [Outcome(three, f"{_name(case)}-whole", cluster) for cluster in ("west", "east", "north")]
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].distance(outcomes[1]) == outcomes[0].distance(outcomes[2]) == 0.0
    assert len({outcome.report["parameter_digest"] for outcome in outcomes}) == 1
