"""LoRA under local_steps over real MPI: the merge rules, with equal and with unequal ranks, and codecs that lose."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import paddle
import pytest
from jobs import Outcome, run_forked
from models import build

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60, func_only=True)]  # runs have limits of their own

BOTH = ("west", "east")
ALPHA = 8  # of both models
LOCAL = {"sync_strategy": "local_steps", "sync_every": "3", "sync_parameters": "adapters"}
PRODUCT = {**LOCAL, "sync_lora_merge": "product"}
UNSENT = {"sync_codec": "topk:8/64,2bit", "sync_keep_unsent": True}
WIDE = {"per_cluster": {"east": {"model": "lora-wide"}}}


def _spec(name: str, nebula: dict, steps: int = 7, **more) -> dict:
    train = {"max_steps": steps, "learning_rate": 1e-2, **more.pop("train", {})}
    return {"name": name, "model": "lora", "batch": 2, "nebula": nebula, "train": train, **more}


EQUAL_RANKS = [
    _spec("mean", LOCAL),
    _spec("product", PRODUCT),
    _spec("product-int8", {**PRODUCT, "sync_codec": "int8"}),
    _spec("freeze", {**LOCAL, "sync_lora_merge": "freeze_a"}),
    _spec("freeze-int8", {**LOCAL, "sync_lora_merge": "freeze_a", "sync_codec": "int8"}),
    _spec("unsent", {**LOCAL, **UNSENT}),
    _spec("unsent-product", {**PRODUCT, **UNSENT}),
]
UNEQUAL_RANKS = [
    _spec("ranks", PRODUCT, **WIDE),
    _spec("ranks-int8", {**PRODUCT, "sync_codec": "int8"}, **WIDE),
    _spec("ranks-unsent", {**PRODUCT, **UNSENT}, **WIDE),
]
ONCE = [
    [_spec(f"{name}-once", PRODUCT, 3, **more), _spec(f"{name}-alone", PRODUCT, 3, trainer="plain", **more)]
    for name, more in (("product", {}), ("ranks", WIDE))
]
SAVING = {"save_strategy": "steps", "save_steps": 4}  # between two rounds
STOPPED = [
    _spec("ranks-int8-killed", UNEQUAL_RANKS[1]["nebula"], output="stopped", kill_at=5, train=SAVING, **WIDE),
    _spec("ranks-int8-resumed", UNEQUAL_RANKS[1]["nebula"], output="stopped", resume=4, train=SAVING, **WIDE),
]
REFUSED = [
    _spec("ranks-mean", LOCAL, **WIDE),
    _spec("no-lora", {**PRODUCT, "sync_parameters": "trainable"}, model="mlp"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs."""
    folder = tmp_path_factory.mktemp("lora")
    run_forked([[spec] for spec in [*EQUAL_RANKS, *UNEQUAL_RANKS, *REFUSED]] + [*ONCE, STOPPED], folder)
    return folder


def _both(folder, name: str) -> list[Outcome]:
    outcomes = [Outcome(folder, name, cluster) for cluster in BOTH]
    assert [outcome.error for outcome in outcomes] == [None, None]
    return outcomes


def _factors(parameters: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The number of each A -> A and B: no other matrix of these models is that narrow."""
    keys = sorted(parameters)
    return {
        a: (parameters[a], parameters[b])
        for a, b in pairwise(keys)
        if parameters[a].ndim == parameters[b].ndim == 2 and parameters[a].shape[1] == parameters[b].shape[0] <= 8
    }


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a pair adds to its layer's weight."""
    return a.astype(np.float64) @ b * (ALPHA / a.shape[1])


@pytest.mark.parametrize("name", [spec["name"] for spec in EQUAL_RANKS])
def test_with_equal_ranks_clusters_end_identical(folder, name):
    west, east = _both(folder, name)
    assert west.distance(east) == 0.0
    assert len(_factors(west.parameters)) == 4
    _assert_reports(west, east)
    assert [entry["digest"] for entry in west.report["per_round"]] == [
        entry["digest"] for entry in east.report["per_round"]
    ]


@pytest.mark.parametrize("name", [spec["name"] for spec in UNEQUAL_RANKS])
def test_with_unequal_ranks_each_cluster_keeps_its_own(folder, name):
    west, east = _both(folder, name)
    _assert_reports(west, east)
    pairs = [_factors(outcome.parameters) for outcome in (west, east)]
    assert pairs[0].keys() == pairs[1].keys()
    assert {a.shape[1] for a, _ in pairs[0].values()} == {4}
    assert {a.shape[1] for a, _ in pairs[1].values()} == {8}
    for key in pairs[0]:
        narrow, wide = (_product(*pair[key]) for pair in pairs)
        # The narrow one is the best approximation to the wide one, which is one to their mean.
        np.testing.assert_allclose(narrow, _of_rank(wide, 4), atol=1e-4 * np.abs(wide).max())
        assert np.abs(narrow - wide).max() > 1e-3 * np.abs(wide).max()
    factors = {number for key in pairs[0] for number in (key, f"{int(key) + 1:03d}")}
    for key in set(west.parameters) - factors:
        np.testing.assert_array_equal(west.parameters[key], east.parameters[key])


def _assert_reports(west: Outcome, east: Outcome) -> None:
    for outcome in (west, east):
        report = outcome.report
        assert report["strategy"] == "local_steps"
        assert report["backend"] == "host"
        assert [entry["step"] for entry in report["per_round"]] == [3, 6, 7]
        assert report["rounds"] == 3
        assert report["degradations"] == []
        assert report["parameters_selected"] == outcome.result["trainable"]
        assert report["members"] == list(BOTH)
    assert west.report["parameter_digest"] == east.report["parameter_digest"]
    assert west.report["bytes_by_kind"]["BUCKET"][0] == east.report["bytes_by_kind"]["BUCKET"][1]


def _of_rank(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("name", ["product", "ranks"])
def test_a_round_is_the_mean_of_the_products(folder, name):
    """Of what each cluster's plain job makes of its factors in the same three steps."""
    alone = [_factors(Outcome(folder, f"{name}-alone", cluster).parameters) for cluster in BOTH]
    for outcome in _both(folder, f"{name}-once"):
        for key, (a, b) in _factors(outcome.parameters).items():
            mean = sum(_product(*pairs[key]) for pairs in alone) / 2
            wanted = _of_rank(mean, a.shape[1])
            np.testing.assert_allclose(_product(a, b), wanted, atol=1e-4 * np.abs(mean).max())


@pytest.mark.parametrize("name", ["freeze", "freeze-int8"])
def test_a_frozen_factor_stays_and_does_not_travel(folder, name):
    paddle.seed(7)
    built = {f"{i:03d}": p.numpy() for i, p in enumerate(build("lora").parameters())}
    west, _ = _both(folder, name)
    for key, (a, b) in _factors(west.parameters).items():
        np.testing.assert_array_equal(a, built[key])
        assert np.abs(b).max() > 0 == np.abs(_factors(built)[key][1]).max()
    trained = sum(b.size for _, b in _factors(west.parameters).values())
    assert west.report["parameters_selected"] == trained == Outcome(folder, "mean", "west").result["trainable"] // 2
    per_parameter = {"freeze": 4, "freeze-int8": 1.02}[name]
    sent = west.report["bytes_by_kind"]["BUCKET"][0]
    assert 3 * trained < sent <= 3 * (per_parameter * trained + 44)


def test_what_was_not_sent_is_in_the_end(folder):
    """With sync_keep_unsent the last round is dense, so that about what lossless rounds give comes out."""
    lossy, lossless = Outcome(folder, "unsent", "west"), Outcome(folder, "mean", "west")
    pairs = zip(_factors(lossy.parameters).values(), _factors(lossless.parameters).values(), strict=True)
    for ours, theirs in pairs:
        moved = np.abs(_product(*theirs)).max()  # B begins as zeros
        assert np.abs(_product(*ours) - _product(*theirs)).max() < 0.5 * moved
    per_round = [entry["bytes_sent"] for entry in lossy.report["per_round"]]
    assert per_round[0] < 0.7 * per_round[2]


def test_resumed_between_rounds_equals_uninterrupted(folder):
    """With unequal ranks, whose anchors each cluster keeps of all."""
    for cluster in BOTH:
        whole, resumed = Outcome(folder, "ranks-int8", cluster), Outcome(folder, "ranks-int8-resumed", cluster)
        assert (whole.error, resumed.error) == (None, None)
        assert whole.distance(resumed) == 0.0
        assert whole.report["parameter_digest"] == resumed.report["parameter_digest"]
        assert whole.result["losses"][4:] == resumed.result["losses"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ranks-mean", "HandshakeError: .*selection"),
        ("no-lora", "ConfigurationError: .*'product'"),
    ],
)
def test_what_cannot_be_merged_is_refused_on_both(folder, name, words):
    for cluster in BOTH:
        error = Outcome(folder, name, cluster).error
        assert error is not None
        with pytest.raises(AssertionError, match=f"(?s){words}"):
            raise AssertionError(error)
