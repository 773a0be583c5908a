"""Fixed-point sums against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paddlenlp_nebula.privacy.fixed_point import FixedPoint, fixed_point_for

NARROW, WIDE = fixed_point_for(1.0), fixed_point_for(None)


def total(fixed_point: FixedPoint, vectors: list[np.ndarray], shares: list[np.float32]) -> np.ndarray:
    ring = sum(
        (fixed_point.encode(vector, share) for vector, share in zip(vectors, shares, strict=True)),
        np.zeros(len(vectors[0]), fixed_point.dtype),
    )
    return fixed_point.decode(ring)


@pytest.mark.parametrize("fixed_point", [NARROW, WIDE])
@pytest.mark.parametrize("weights", [[1, 1, 1], [7, 2, 1], [1] * 64, [1, 0, 1]])
def test_a_weighted_sum_is_right_to_the_step(fixed_point: FixedPoint, weights: list[float]) -> None:
    rng = np.random.default_rng(1)
    vectors = [rng.uniform(-1, 1, 1000).astype(np.float32) for _ in weights]
    shares = [np.float32(weight / sum(weights)) for weight in weights]
    exact = sum(float(share) * vector.astype(np.float64) for share, vector in zip(shares, vectors, strict=True))
    error = np.abs(total(fixed_point, vectors, shares) - exact)
    assert (error <= len(weights) * fixed_point.step / 2 + np.abs(exact) * 2**-24).all()


@pytest.mark.parametrize("fixed_point", [NARROW, WIDE])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_wrap_around(fixed_point: FixedPoint, sign: int) -> None:
    vectors = [np.full(1, sign * fixed_point.limit, np.float32)] * 64
    assert total(fixed_point, vectors, [np.float32(1 / 64)] * 64)[0] == sign * fixed_point.limit
    assert total(fixed_point, vectors, [np.float32(1), *[np.float32(0)] * 63])[0] == sign * fixed_point.limit


@pytest.mark.parametrize("fixed_point", [NARROW, WIDE])
def test_what_does_not_fit_is_found(fixed_point: FixedPoint) -> None:
    vector = np.zeros(10, np.float32)
    vector[7] = -np.nextafter(np.float32(fixed_point.limit), np.float32(np.inf))
    with pytest.raises(OverflowError) as over:
        fixed_point.encode(vector, np.float32(0.1))
    assert over.value.args == (7,)


@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 1.0, 1.5, 1e6])
@pytest.mark.parametrize("noise", [0.0, 0.1, 5.0])
def test_a_bound_leaves_room_for_its_noise_and_little_more(clip_norm: float, noise: float) -> None:
    fixed_point = fixed_point_for(clip_norm, noise * clip_norm)
    largest = clip_norm * (1 + noise * math.sqrt(2 * 53 * math.log(2)))
    assert largest <= fixed_point.limit <= 2.01 * largest
    assert (fixed_point.bits, math.log2(fixed_point.step) % 1) == (32, 0)


def test_without_a_bound_small_numbers_keep_their_precision() -> None:
    assert (WIDE.bits, WIDE.limit) == (64, 2.0**22)
    tiny = np.full(1, 1e-7, np.float32)
    assert total(WIDE, [tiny] * 3, [np.float32(1 / 3)] * 3)[0] == pytest.approx(1e-7, rel=2e-5)
