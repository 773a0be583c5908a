"""local_steps in the Trainer: against models averaged by hand, and what must hold at its edges."""

from __future__ import annotations

import numpy as np
import pytest
from jobs import Outcome, run_clusters, run_forked

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60, func_only=True)]  # runs have limits of their own

LOCAL = {"sync_strategy": "local_steps", "sync_every": "3"}
NESTEROV = {"sync_outer": "nesterov", "sync_outer_lr": 0.7, "sync_outer_momentum": 0.9}
FOUR = [3, 6, 9, 12]
BOTH = ("west", "east")


def _spec(name: str, model: str = "mlp", nebula: dict | None = None, train: dict | None = None, **more) -> dict:
    common = {"name": name, "model": model, "nebula": {**LOCAL, **(nebula or {})}, "clusters": list(BOTH)}
    return {**common, "train": {"max_steps": 12, **(train or {})}, **more}


def _llama(name: str, model: str = "llama", **more) -> dict:
    return _spec(name, model, train={"learning_rate": 1e-3, **more.pop("train", {})}, **more)


UNEQUAL = {"west": {"batch": 8}, "east": {"batch": 2}}
REFERENCE = [
    _spec("average", rounds=FOUR),
    _spec("nesterov", nebula=NESTEROV, rounds=FOUR),
    _spec("momentum", nebula={"sync_outer": "sgd", "sync_outer_lr": 0.8, "sync_outer_momentum": 0.5}, rounds=FOUR),
    _spec("samples", per_cluster=UNEQUAL, weights={"west": 8, "east": 2}, rounds=FOUR),
    _spec("equal", per_cluster=UNEQUAL, nebula={"sync_weight": "equal"}, rounds=FOUR),
    _llama(  # 2 x 12 and 4 x 4 tokens
        "tokens",
        nebula={"sync_weight": "tokens"},
        per_cluster={"west": {"batch": 2}, "east": {"batch": 4}},
        length={"west": 12, "east": 4},
        weights={"west": 24, "east": 16},
        rounds=FOUR,
    ),
    _spec("short-last-round", nebula={"sync_every": "4"}, train={"max_steps": 10}, rounds=[4, 8, 10]),
    _spec("growing", nebula={"sync_every": "1..4"}, rounds=[1, 2, 3, 4, 6, 8, 11, 12]),
    _spec(  # two rounds each, and all in the last one
        "fragments",
        nebula={"sync_every": "4", "sync_fragments": 2},
        train={"max_steps": 10},
        fragments=[["first.weight", "first.bias"], ["second.weight", "second.bias"]],
        rounds=[2, 4, 6, 8, 10],
    ),
    _spec(
        "accumulation-clipping",
        train={"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "weight_decay": 0.1},
        rounds=FOUR,
    ),
    _spec("cosine", train={"warmup_steps": 3, "lr_scheduler_type": "cosine"}, rounds=FOUR),
    _spec("tied", "mlp-tied", rounds=FOUR),
    _spec("unused", "mlp-unused", rounds=FOUR),
    _spec("frozen", "mlp-frozen", rounds=FOUR),
    _spec("norm", "mlp-norm", rounds=FOUR),
    _llama("llama", rounds=FOUR),
    _llama("lora", "lora", nebula={"sync_parameters": "adapters"}, rounds=FOUR),
    # East is lost after round 1, and west goes on by itself: what it has learned since is not lost.
    _spec("lost", per_cluster={"east": {"kill_at": 4}}, rounds=[3]),
]
NAMES = [spec["name"] for spec in REFERENCE]
_BEST = {
    "max_steps": 40,
    "learning_rate": 0.2,
    "evaluation_strategy": "steps",
    "save_strategy": "steps",
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}


def _best(name: str, every: str, steps: int, **more) -> dict:
    train = {**_BEST, "eval_steps": steps, "save_steps": steps}
    return _spec(name, nebula={"sync_every": every, **more}, train=train, eval_items=8, patience=1)


TOPK = {"sync_codec": "topk:8/64,2bit"}
HALF = {"model": "mlp-half", "optimizer": "masters", "train": {"max_steps": 3, "learning_rate": 1e-3}}
OTHERS = [
    _spec("alone", "mlp-dropout", clusters=["west"]),
    _spec("plain", "mlp-dropout", clusters=["west"], trainer="plain"),
    _spec("alone-longer", "mlp-dropout", clusters=["west"], train={"max_steps": 13}),
    _spec("callback", trainer="callback"),
    {**_spec("half"), **HALF},
    {**_spec("half-alone", trainer="plain"), **HALF},
    _spec("half-long", "mlp-half", optimizer="masters", train={"learning_rate": 0.1}),
    _spec("stopped", per_cluster={"west": {"stop_at": 4}}, train={"save_strategy": "steps", "save_steps": 1}),
    _spec("stopped-at-a-round", per_cluster={"west": {"stop_at": 6}}),
    _spec("all-stopped-at-a-round", stop_at=6),
    _spec("stopped-with-unsent", nebula={**TOPK, "sync_keep_unsent": True}, per_cluster={"west": {"stop_at": 6}}),
    _spec("all-stopped-with-unsent", nebula={**TOPK, "sync_keep_unsent": True}, stop_at=6),
    _best("best", "2", 4),
    _best("best-at-every-second", "8", 4),
    _best("best-growing", "2..4", 4),
    _best("best-fragments", "4", 4, sync_fragments=2),
    _best("best-unsent", "4", 4, sync_keep_unsent=True, **TOPK),
    _spec("balance-evaluated", nebula={"sync_every": "auto-balance:4"}, eval_items=8, train={
        "evaluation_strategy": "steps", "eval_steps": 4}),
    _spec("evaluated", eval_items=8, train={"evaluation_strategy": "steps", "eval_steps": 4}),
    _spec("balance", nebula={"sync_every": "auto-balance:4"}, train={"max_steps": 32}, per_cluster={
        "east": {"pause_s": 1.5}}),  # much longer than a step, also on a busy machine
]  # fmt: skip


def _resumed(
    name: str, nebula: dict | None = None, how: str = "", first: dict = TOPK, step: int = 4, **per_cluster: dict
) -> list[dict]:
    """A run with a checkpoint in the middle of round 2, and one that goes on from it otherwise."""
    saving = {"save_strategy": "steps", "save_steps": step}
    killed = _spec(f"{name}-killed", nebula=first, train=saving, output=name, kill_at=step + 1)
    resumed = _spec(f"{name}-resumed", nebula={**first, **(nebula or {})}, train=saving, output=name, resume=step)
    return [killed, {**resumed, "spoil": how, "per_cluster": per_cluster}]


RESUMED = [
    _resumed("missing", how="missing"),
    _resumed("missing-once", east={"spoil": "missing"}),
    _resumed("damaged", east={"spoil": "damaged"}),
    _resumed("other-codec", {"sync_codec": "int8"}),
    _resumed("no-codec", {"sync_codec": "fp32"}),
    _resumed("other-outer", NESTEROV),
    _resumed("every-step-no-codec", {"sync_codec": "fp32"}, first={**TOPK, "sync_strategy": "every_step"}),
    _resumed("first-round", first={}, step=2),
    _resumed("other-fragments", {"sync_every": "4", "sync_fragments": 2}),
]
ON_A_DEVICE = {"east": {"nebula": {**LOCAL, "sync_backend": "device"}}}
PARALLEL = [
    _spec("parallel", rounds=FOUR),
    _spec("parallel-nesterov", nebula=NESTEROV, rounds=FOUR),
    _spec("parallel-device", per_cluster=ON_A_DEVICE, rounds=FOUR),
]
SHARDED = [
    _llama("stage1", train={"sharding": "stage1"}, rounds=FOUR),
    _llama("stage1-lora", "lora", train={"sharding": "stage1"}, nebula={"sync_parameters": "adapters"}, rounds=FOUR),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything with one process per cluster."""
    folder = tmp_path_factory.mktemp("local")
    parallel = [{**spec, "train": {k: v for k, v in spec["train"].items() if k != "sharding"}} for spec in SHARDED]
    goes_on = _spec("east-goes-on", rounds=[3, 6], last=9)
    by_hand = [[{**spec, "jobs": ["local-reference"]}] for spec in [*REFERENCE, *PARALLEL, *parallel, goes_on]]
    run_forked(by_hand + [[spec] for spec in REFERENCE + OTHERS] + RESUMED, folder)
    return folder


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """Two processes per cluster."""
    folder = tmp_path_factory.mktemp("parallel")
    run_clusters(PARALLEL, folder, processes=2)
    run_clusters(SHARDED, folder, processes=2)  # fleet is initialised once per process
    return folder


def _both(folder, name: str) -> list[Outcome]:
    outcomes = [Outcome(folder, name, cluster) for cluster in BOTH]
    assert [outcome.error for outcome in outcomes] == [None, None]
    return outcomes


def _near(mine: dict, wanted: dict, relative: float = 1e-6) -> None:
    """Equal but for float32 roundings, measured by the largest number of each array."""
    assert mine.keys() == wanted.keys()
    for key, array in wanted.items():
        assert np.abs(mine[key] - array).max(initial=0.0) <= relative * np.abs(array).max(initial=1e-30), key


def _reference(folder, name: str, cluster: str) -> tuple[dict, dict]:
    stem = f"{name}.{cluster}-reference.r0"
    return dict(np.load(folder / f"{stem}.npz")), dict(np.load(folder / f"{stem}.state.npz"))


# Against the average by hand


@pytest.mark.parametrize("name", NAMES)
def test_models_are_averaged(folder, name):
    for cluster in ("west",) if name == "lost" else BOTH:
        mine = Outcome(folder, name, cluster)
        assert mine.error is None
        parameters, _ = _reference(folder, name, cluster)
        if name == "norm":  # first.bias has no gradient but roundings, out of which AdamW makes steps
            for key in ("001", "006"):  # and norm._mean follows it
                del mine.parameters[key], parameters[key]
        _near(mine.parameters, parameters)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("norm", "lost")])
def test_all_clusters_end_identical(folder, name):
    west, east = _both(folder, name)
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    assert west.report["degradations"] == east.report["degradations"] == []
    spec = next(spec for spec in REFERENCE if spec["name"] == name)
    assert [entry["step"] for entry in west.report["per_round"]] == spec["rounds"]


@pytest.mark.parametrize("name", ["average", "nesterov", "accumulation-clipping"])
def test_the_inner_optimizers_state_is_each_clusters_own(folder, name):
    west, east = _both(folder, name)
    assert any(np.abs(west.state[key] - east.state[key]).max() > 0 for key in west.state if "moment" in key)
    for outcome, cluster in ((west, "west"), (east, "east")):
        _near(outcome.state, _reference(folder, name, cluster)[1], 1e-5)
    powers = [float(array.max()) for key, array in west.state.items() if "beta1_pow" in key]
    assert powers == pytest.approx([0.9**13] * 4)  # of the next step: never reset


@pytest.mark.parametrize("name", ["average", "cosine", "growing", "accumulation-clipping"])
def test_the_learning_rate_is_that_of_a_run_alone(folder, name):
    alone = Outcome(folder, name, "local-reference").result["rates"]
    for outcome, cluster in zip(_both(folder, name), BOTH, strict=True):
        assert outcome.result["rates"] == alone[cluster]


def test_running_statistics_stay_local(folder):
    west, east = _both(folder, "norm")
    different = [key for key, array in west.parameters.items() if (array != east.parameters[key]).any()]
    assert len(different) == 2
    assert all("running statistics" in outcome.report["degradations"][0] for outcome in (west, east))


def test_a_lost_cluster_leaves_the_other_one_to_go_on(folder):
    west = Outcome(folder, "lost", "west")
    assert west.result["steps"] == 12
    assert west.report["members"] == ["west"]
    assert any("east" in sentence for sentence in west.report["degradations"])
    assert west.report["status"] == "done"


def test_only_adapters_travel(folder):
    west, _ = _both(folder, "lora")
    report = west.report
    payload = 4 * west.result["trainable"] * report["rounds"]
    assert report["parameters_selected"] == west.result["trainable"] < report["parameters_total"]
    assert payload < report["bytes_by_kind"]["BUCKET"][0] <= 1.02 * payload + 44 * report["rounds"]


# Other ways to run


def test_alone_is_bit_equal_to_no_plugin(folder):
    mine, plain = Outcome(folder, "alone", "west"), Outcome(folder, "plain", "west")
    assert (mine.error, plain.error) == (None, None)
    assert mine.distance(plain) == 0.0
    assert mine.result["losses"] == plain.result["losses"]
    assert mine.report["bytes_sent"] == mine.report["rounds"] == 0
    assert mine.report["parameter_digest"] != Outcome(folder, "alone-longer", "west").report["parameter_digest"]


def test_the_callback_alone_does_the_same(folder):
    assert _both(folder, "callback")[0].distance(_both(folder, "average")[0]) == 0.0


def test_changes_are_those_of_the_float32_masters(folder):
    """Steps that are too small for a bfloat16 weight are averaged all the same."""
    west, east = _both(folder, "half")
    alone = _both(folder, "half-alone")
    masters = [key for key in west.state if key.endswith("_master")]
    assert len(masters) == 4
    for key in masters:
        assert west.state[key].tobytes() == east.state[key].tobytes()
        assert (alone[0].state[key] != alone[1].state[key]).any()
        wanted = (alone[0].state[key].astype(np.float64) + alone[1].state[key]) / 2
        assert np.abs(west.state[key] - wanted).max() <= 1e-7, key
    west, east = _both(folder, "half-long")
    assert west.distance(east) == 0.0
    assert all(west.state[key].tobytes() == east.state[key].tobytes() for key in masters)


@pytest.mark.parametrize("name", [spec["name"] for spec in [*PARALLEL, *SHARDED]])
def test_two_processes_per_cluster_are_one(parallel, folder, name):
    outcomes = [Outcome(parallel, name, cluster, rank) for cluster in BOTH for rank in (0, 1)]
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcomes[0].distance(other) for other in outcomes[1:]] == [0.0] * 3
    _near(outcomes[0].parameters, _reference(folder, name, "west")[0], 1e-5)  # gradients are summed in another order


# Ends


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("stopped", (4, 6)),
        ("stopped-at-a-round", (6, 9)),
        ("stopped-with-unsent", (6, 9)),
        ("all-stopped-at-a-round", (6, 6)),
        ("all-stopped-with-unsent", (6, 6)),
    ],
)
def test_a_cluster_that_stops_early_ends_the_others_at_their_next_round(folder, name, steps):
    west, east = _both(folder, name)
    assert (west.result["steps"], east.result["steps"]) == steps
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    assert west.report["degradations"] == []
    told = [f"cluster 'west' ended training before step {steps[1]}: everybody ends there"]
    assert east.report["degradations"] == (told if steps[0] < steps[1] else [])
    assert {west.report["status"], east.report["status"]} == {"done"}


def test_what_was_done_until_the_end_counts(folder):
    """West has stopped after the round of step 6, so that all of what east has done since is taken over."""
    stopped, reference = _both(folder, "stopped-at-a-round")[1], _reference(folder, "east-goes-on", "east")[0]
    _near(stopped.parameters, reference)


def test_early_stopping_and_the_best_model_agree(folder):
    west, east = _both(folder, "best")
    assert west.result["steps"] == east.result["steps"] < 40
    metrics = [[e["eval_loss"] for e in outcome.result["evaluations"]] for outcome in (west, east)]
    assert metrics[0] == metrics[1]
    assert metrics[0][-1] != min(metrics[0])  # the best is not the last one
    assert west.distance(east) == 0.0
    assert west.report["parameter_digest"] == east.report["parameter_digest"]


def test_evaluations_between_rounds_agree(folder):
    west, east = _both(folder, "evaluated")
    metrics = [[e["eval_loss"] for e in outcome.result["evaluations"]] for outcome in (west, east)]
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best-at-every-second", "save_steps must be a multiple of sync_every (8), got 4"),
        ("best-growing", "sync_every must be a fixed number of steps, got '2..4'"),
        ("best-fragments", "sync_fragments must be 1, got 2"),
        ("best-unsent", "sync_keep_unsent must be false"),
        ("balance-evaluated", "evaluation_strategy must be 'no'"),
    ],
)
def test_what_no_cluster_could_agree_on_is_refused_before_training(folder, name, words):
    for cluster in BOTH:
        outcome = Outcome(folder, name, cluster)
        assert outcome.error is not None
        assert words in outcome.error
        assert outcome.error.startswith("ConfigurationError")


def test_a_slower_cluster_takes_fewer_steps(folder):
    """Its data takes long; with as many steps as the other one it would be waited for most of the time."""
    west, east = _both(folder, "balance")
    steps = [[entry["step"] for entry in outcome.report["per_round"]] for outcome in (west, east)]
    assert steps[0] == [4, 8, 12, 16, 20, 24, 28, 32]
    taken = np.diff(steps[1])
    assert steps[1][0] == 4
    assert (taken <= 2).all()
    assert (taken >= 1).all()
    assert west.distance(east) == 0.0


# Resuming


def test_resumed_before_the_first_round_equals_uninterrupted(folder):
    for cluster in BOTH:
        whole, resumed = (Outcome(folder, name, cluster) for name in ("average", "first-round-resumed"))
        assert resumed.error is None
        assert whole.distance(resumed) == 0.0
        assert whole.report["rounds"] == resumed.report["rounds"]


def test_without_its_state_a_run_goes_on_and_says_so(folder):
    west, east = _both(folder, "missing-resumed")
    assert west.distance(east) == 0.0
    for outcome in (west, east):
        assert any(
            "the checkpoint of step 4 holds no nebula_state.safetensors" in sentence
            for sentence in outcome.report["degradations"]
        )


@pytest.mark.parametrize(
    ("name", "words", "clusters"),
    [
        ("missing-once", "cluster 'east' has nebula_state='missing': put the cluster's own", BOTH),
        ("damaged", "damaged/east/checkpoint-4/nebula_state.safetensors must hold", ("east",)),
        ("other-codec", "what sync_codec='int8' has not sent, got that of 'topk:8/64,2bit'", BOTH),
        ("no-codec", "what sync_codec='fp32' has not sent, got that of 'topk:8/64,2bit'", BOTH),
        ("other-outer", "resume with the sync_strategy, sync_outer", BOTH),
        ("other-fragments", "resume with the sync_strategy, sync_outer, sync_fragments", BOTH),
        ("every-step-no-codec", "what sync_codec='fp32' has not sent, got that of 'topk:8/64,2bit'", BOTH),
    ],
)
def test_another_state_is_refused(folder, name, words, clusters):
    errors = [Outcome(folder, f"{name}-resumed", cluster).error for cluster in BOTH]
    assert None not in errors
    for cluster in clusters:
        assert words in errors[BOTH.index(cluster)]
