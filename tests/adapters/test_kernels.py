"""The kernels against numpy, and the machine code they become."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from paddlenlp_nebula.adapters import kernels
from paddlenlp_nebula.adapters.kernels import cholesky, combine, gram, multiply, orthogonalise

SIZES = st.integers(1, 13)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), n=SIZES, k=SIZES, seed=st.integers(0, 99))
def test_products(m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tall, weights = rng.standard_normal((m, n), dtype=np.float32), rng.standard_normal((n, k))
    wide = tall.astype(np.float64)
    np.testing.assert_allclose(gram(tall), wide.T @ wide, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(multiply(wide, weights), wide @ weights, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(combine(tall, weights), wide @ weights, rtol=2e-7, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(n=SIZES, rank=SIZES, limit=SIZES, seed=st.integers(0, 99))
def test_cholesky_of_rank_deficient_matrices(n: int, rank: int, limit: int, seed: int) -> None:
    root = np.random.default_rng(seed).standard_normal((rank, n))
    square = root.T @ root
    factor, pivots = cholesky(square, limit, 1e-10)
    steps = min(n, rank, limit)
    assert factor.shape == (steps, n)
    assert len(set(pivots)) == steps
    assert np.all(np.tril(factor[:, pivots], -1) == 0)
    # what is taken away is exact in the chosen rows, and all of it without a limit
    np.testing.assert_allclose((factor.T @ factor)[pivots], square[pivots], atol=1e-9)
    if limit >= min(n, rank):
        np.testing.assert_allclose(factor.T @ factor, square, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 12), n=st.integers(1, 12), rank=st.integers(0, 12), scale=st.integers(-6, 0), seed=st.integers()
)
def test_jacobi_against_lapack(k: int, n: int, rank: int, scale: int, seed: int) -> None:
    rng = np.random.default_rng(seed % 1000)
    matrix = rng.standard_normal((k, rank)) @ rng.standard_normal((rank, n)) * 10.0 ** (scale * np.arange(k))[:, None]
    rows, companion = matrix.copy(), np.eye(k)
    singular = orthogonalise(rows, companion)
    expected = np.zeros(k)
    expected[: min(k, n)] = np.linalg.svd(matrix, compute_uv=False)
    largest = max(expected[0], 1e-300)
    np.testing.assert_allclose(singular, expected, atol=1e-13 * largest)
    np.testing.assert_allclose(companion @ companion.T, np.eye(k), atol=1e-13)
    np.testing.assert_allclose(companion @ matrix, rows, atol=1e-13 * largest)
    np.testing.assert_allclose(rows @ rows.T, np.diag(expected**2), atol=1e-13 * largest**2)


def test_jacobi_separates_equal_singular_values() -> None:
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))[0]
    np.testing.assert_allclose(orthogonalise(rows, np.eye(9)), np.ones(9), atol=1e-14)


@pytest.mark.parametrize("name", ["gram", "combine", "orthogonalise"])
def test_no_multiplication_is_fused_with_an_addition(name: str) -> None:
    fresh = njit(getattr(kernels, name).py_func)  # no machine code can be read from numba's cache
    small: npt.NDArray[np.float32] = np.ones((9, 5), dtype=np.float32)
    fresh(*{"gram": (small,), "combine": (small, np.ones((5, 3)))}.get(name, (np.ones((3, 5)), np.eye(3))))
    code = "".join(fresh.inspect_asm().values())
    assert re.search(r"\bv?f?mul", code), "no multiplication found: is this the right place to look?"
    assert not re.search(r"\b(vfn?m(add|sub)|fn?m(add|sub|la|ls))", code)
