"""The product rule against dense float64 linear algebra."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.adapters.merge import Factors, merge_products

from .digest import digest

Dense = npt.NDArray[np.float64]


def member(rng: Any, rows: int, columns: int, rank: int, scaling: float = 1.0, size: float = 1.0) -> Factors:
    a = rng.uniform(-1, 1, (rows, rank)).astype(np.float32)
    return Factors(a, (size * rng.standard_normal((rank, columns))).astype(np.float32), scaling)


def product(factors: Factors) -> Dense:
    return factors.a.astype(np.float64) @ factors.b.astype(np.float64) * factors.scaling


def average(members: Sequence[Factors], weights: Sequence[float]) -> Dense:
    return np.sum([w * product(m) for m, w in zip(members, weights, strict=True)], axis=0)


def merged(members: Sequence[Factors], weights: Sequence[float], rank: int, scaling: float = 1.0) -> Factors:
    a, b = merge_products(members, weights, rank, scaling)
    assert a.dtype == b.dtype == np.float32
    assert a.shape == (len(members[0].a), rank)
    assert b.shape == (rank, members[0].b.shape[1])
    return Factors(a, b, scaling)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Factors], list[float]]:
    """Members of unequal rank, scaling, magnitude and weight; in and out on either side of each other and of the ranks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, columns, count = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 4))
    sizes = st.sampled_from([1e-6, 1e-3, 1.0, 30.0])
    scalings = st.sampled_from([0.25, 1.0, 2.0, 16.0])
    members = [member(rng, rows, columns, draw(st.integers(1, 12)), draw(scalings), draw(sizes)) for _ in range(count)]
    weights = rng.dirichlet(np.ones(count))
    return members, [float(w) for w in weights]


@settings(max_examples=150, deadline=None)
@given(case=clusters(), data=st.data())
def test_the_best_approximation_of_its_rank(case: tuple[list[Factors], list[float]], data: st.DataObject) -> None:
    members, weights = case
    rank, scaling = data.draw(st.integers(1, 16)), data.draw(st.sampled_from([0.5, 1.0, 4.0]))
    expected = average(members, weights)
    best = float(np.sqrt(np.sum(np.linalg.svd(expected, compute_uv=False)[rank:] ** 2)))
    error = float(np.linalg.norm(product(merged(members, weights, rank, scaling)) - expected))
    assert error <= best * (1 + 1e-5) + 1e-6 * float(np.linalg.norm(expected))


@settings(max_examples=50, deadline=None)
@given(case=clusters(), seed=st.integers(0, 99))
def test_the_order_of_the_members_matters_only_for_rounding(case: tuple[list[Factors], list[float]], seed: int) -> None:
    members, weights = case
    order = np.random.default_rng(seed).permutation(len(members))
    rank = sum(m.a.shape[1] for m in members)  # nothing is cut, where two directions might be equally long
    one, other = (
        product(merged(ms, ws, rank))
        for ms, ws in ((members, weights), ([members[i] for i in order], [weights[i] for i in order]))
    )
    np.testing.assert_allclose(one, other, atol=1e-6 * np.linalg.norm(one))


@settings(max_examples=50, deadline=None)
@given(rank=st.integers(1, 8), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_identical_members_keep_their_product(rank: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = member(rng, 20, 30, rank, scaling=2.0)
    weights = [float(w) for w in rng.dirichlet(np.ones(count))]
    np.testing.assert_allclose(
        product(merged([one] * count, weights, rank, 2.0)), product(one), atol=1e-6 * np.linalg.norm(product(one))
    )


@pytest.mark.parametrize("size", [1e-8, 1.0])
def test_a_is_as_long_as_before_and_orthogonal_and_b_carries_the_singular_values(size: float) -> None:
    rng = np.random.default_rng(0)
    members = [member(rng, 50, 40, 8, size=size) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    result = merged(members, weights, 8)
    length = np.sqrt(
        np.sum([w * np.sum(m.a.astype(np.float64) ** 2) for w, m in zip(weights, members, strict=True)]) / 8
    )
    np.testing.assert_allclose(result.a.T @ result.a, np.eye(8) * length**2, atol=1e-5 * length**2)
    singular = np.linalg.svd(average(members, weights), compute_uv=False)[:8]
    np.testing.assert_allclose(np.linalg.norm(result.b, axis=1), singular / length, rtol=1e-5)


# Zeros: every LoRA starts with B = 0.


@pytest.mark.parametrize("rank", [4, 8])
def test_a_zero_product_leaves_a_as_it_was(rank: int) -> None:
    rng = np.random.default_rng(0)
    start = {r: member(rng, 30, 20, r, size=0.0) for r in (4, 8)}
    result = merged([start[8], start[4], start[8]], [0.2, 0.3, 0.5], rank)
    np.testing.assert_array_equal(result.a, start[rank].a)
    assert not result.b.any()


@pytest.mark.parametrize("rows", [30, 5])
def test_unused_directions_are_filled_so_that_training_can_use_them(rows: int) -> None:
    """Only two of eight directions are in use; those of A that are not keep their length, and their rows of B are 0."""
    rng = np.random.default_rng(0)
    big = member(rng, rows, 20, 8)
    big.b[2:] = 0
    result = merged([big, big], [0.5, 0.5], 8)
    np.testing.assert_allclose(product(result), product(big), atol=1e-5)
    assert not result.b[2:].any()
    length = np.linalg.norm(big.a) / np.sqrt(8)
    if rows > 8:
        np.testing.assert_allclose(np.linalg.norm(result.a, axis=0), length, rtol=1e-5)
        np.testing.assert_allclose(result.a[:, :2].T @ result.a[:, 2:], 0, atol=1e-4)
    assert np.linalg.norm(result.a, axis=0).min() > 0.2 * length
    assert np.linalg.matrix_rank(result.a) == min(rows, 8)
    # and what was filled lies where the old A was
    outside = result.a - big.a @ np.linalg.lstsq(big.a, result.a, rcond=None)[0]
    np.testing.assert_allclose(outside, 0, atol=1e-4)


def test_a_cluster_of_higher_rank_than_all_the_others_together() -> None:
    rng = np.random.default_rng(0)
    members = [member(rng, 30, 20, 2), member(rng, 30, 20, 3)]
    result = merged(members, [0.5, 0.5], 9)
    np.testing.assert_allclose(product(result), average(members, [0.5, 0.5]), atol=1e-5)
    assert np.linalg.norm(result.a, axis=0).min() > 0.1


def test_a_cluster_whose_a_is_zero_takes_the_others_directions() -> None:
    rng = np.random.default_rng(0)
    empty = Factors(np.zeros((30, 3), dtype=np.float32), np.zeros((3, 20), dtype=np.float32), 1.0)
    members = [empty, member(rng, 30, 20, 2)]
    np.testing.assert_allclose(product(merged(members, [0.5, 0.5], 3)), average(members, [0.5, 0.5]), atol=1e-5)


def test_members_that_cancel() -> None:
    rng = np.random.default_rng(0)
    one = member(rng, 30, 20, 4)
    result = merged([one, Factors(one.a, -one.b, 1.0)], [0.5, 0.5], 4)
    assert np.abs(product(result)).max() <= 1e-6
    assert np.linalg.matrix_rank(result.a) == 4


def test_a_member_without_weight_counts_for_nothing() -> None:
    rng = np.random.default_rng(0)
    one, other = member(rng, 30, 20, 4), member(rng, 30, 20, 4)
    np.testing.assert_allclose(product(merged([one, other], [1.0, 0.0], 4)), product(one), atol=1e-5)


def test_freezing_a_makes_averaging_exact() -> None:
    rng = np.random.default_rng(0)
    members = [member(rng, 30, 20, 4) for _ in range(3)]
    shared = [Factors(members[0].a, m.b, m.scaling) for m in members]
    weights = [0.2, 0.3, 0.5]
    b = np.sum([w * m.b.astype(np.float64) for w, m in zip(weights, shared, strict=True)], axis=0)
    np.testing.assert_allclose(members[0].a @ b, average(shared, weights), atol=1e-6)
    a = np.sum([w * m.a.astype(np.float64) for w, m in zip(weights, members, strict=True)], axis=0)
    b = np.sum([w * m.b.astype(np.float64) for w, m in zip(weights, members, strict=True)], axis=0)
    assert np.linalg.norm(a @ b - average(members, weights)) > 0.3 * np.linalg.norm(average(members, weights))


# The same bytes everywhere.


def test_the_same_bytes_on_another_cpu_and_with_other_thread_counts(tmp_path: Path) -> None:
    """Numba compiles for a plain processor of this family there, and numpy's own loops are the plain ones."""
    variables = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "3")
    variables |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    variables |= {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"}
    program = [sys.executable, str(Path(__file__).with_name("digest.py"))]
    there = subprocess.run(program, capture_output=True, text=True, check=True, timeout=100, env=os.environ | variables)
    assert there.stdout.strip() == digest()


def test_the_same_bytes_twice_and_whatever_the_memory_layout() -> None:
    rng = np.random.default_rng(1)
    members = [member(rng, 64, 48, 8), member(rng, 64, 48, 4)]
    turned = [Factors(np.asfortranarray(m.a), m.b[:, ::-1].copy()[:, ::-1], m.scaling) for m in members]
    digests = {
        hashlib.sha256(b"".join(part.tobytes() for part in merge_products(ms, [0.5, 0.5], 8, 1.0))).hexdigest()
        for ms in (members, members, turned)
    }
    assert len(digests) == 1


# What is refused.

ONE = member(np.random.default_rng(0), 6, 5, 2)


@pytest.mark.parametrize(
    ("members", "weights", "rank", "scaling", "message"),
    [
        ([], [], 2, 1.0, "each member needs one weight, got 0 members and 0 weights"),
        ([ONE], [0.5, 0.5], 2, 1.0, "each member needs one weight, got 1 members and 2 weights"),
        ([ONE], [1.0], 0, 1.0, "rank must be at least 1 and scaling finite and not 0, got 0 and 1.0"),
        ([ONE], [1.0], 2, 0.0, "got 2 and 0.0"),
        ([ONE], [-1.0], 2, 1.0, r"weights must be at least 0 and finite, .* got -1.0 and 1.0 from member 0"),
        ([ONE, Factors(ONE.a, ONE.b, np.nan)], [0.5, 0.5], 2, 1.0, "got 0.5 and nan from member 1"),
        ([Factors(ONE.b, ONE.a, 1.0)], [1.0], 2, 1.0, r"got float32 \(2, 5\) and float32 \(6, 2\) from member 0"),
        ([Factors(ONE.a.astype(float), ONE.b, 1.0)], [1.0], 2, 1.0, r"must be float32 .* got float64 \(6, 2\)"),
        (
            [ONE, Factors(ONE.a[1:], ONE.b, 1.0)],
            [0.5, 0.5],
            2,
            1.0,
            r"got \(5, 5\) from member 1 and \(6, 5\) from member 0",
        ),
        ([ONE, Factors(ONE.a, ONE.b * np.inf, 1.0)], [0.5, 0.5], 2, 1.0, "got inf or nan from member 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    members: list[Factors], weights: list[float], rank: int, scaling: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_products(members, weights, rank, scaling)


def test_merged_factors_beyond_float32_are_refused() -> None:
    """The large product is to be written with columns of A as short as the first member's."""
    small = Factors(np.full((4, 1), 1e-12, np.float32), np.full((1, 3), 1e-8, np.float32), 1.0)
    large = Factors(np.full((4, 2), 1e20, np.float32), np.full((2, 3), 1e30, np.float32), 1.0)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="the merged factors must fit into float32"):
        merge_products([small, large], [0.5, 0.5], 1, 1.0)
