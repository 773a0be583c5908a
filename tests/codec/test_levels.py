"""Values in few bits: errors near those of free levels, every value at its nearest level, odd scales refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.codec.levels import VALUES, Levels, Values

LEVELS = {name: values for name, values in VALUES.items() if isinstance(values, Levels)}
every_format = pytest.mark.parametrize("values", LEVELS.values(), ids=LEVELS)


def coded(values: Values, magnitudes: npt.NDArray[np.floating], counts: list[int]) -> tuple[bytes, Float32Vector]:
    """Scales and decoded values; those that the encoder expects are those that are decoded."""
    sizes = np.array(counts, dtype=np.int32)
    scales, codes, expected = values.encode(magnitudes.astype(np.float32), sizes)
    assert len(scales) == len(counts) * values.scale_bytes
    assert (codes < 1 << values.width).all()
    result = values.decode(memoryview(scales), codes, sizes)
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))
    return scales, result


def free_levels(magnitudes: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.floating]:
    """Of each row (shape (rows, values)) the squared error with ``count`` levels, by Lloyd's algorithm."""
    errors = []
    low, high = magnitudes.min(1, keepdims=True), magnitudes.max(1, keepdims=True)
    for power in (1, 0):
        share = (np.arange(count) + 0.5) / count
        levels = low + (high - low) * share if power else low * (high / low) ** share
        for _ in range(60):
            nearest = np.abs(magnitudes[:, :, None] - levels[:, None, :]).argmin(2)
            for j in range(count):
                own = nearest == j
                means = (magnitudes * own).sum(1) / np.maximum(own.sum(1), 1)
                levels[:, j] = np.where(own.any(1), means, levels[:, j])
        errors.append(((magnitudes - np.take_along_axis(levels, nearest, 1)) ** 2).sum(1))
    return np.minimum(*errors)


@pytest.mark.parametrize(
    ("name", "kind", "stated", "over_free"),
    [
        ("1bit", "normal", 0.110, 1.02),
        ("1bit", "laplace", 0.190, 1.02),
        ("1bit", "student", 0.280, 1.02),
        ("2bit", "normal", 0.063, 1.07),
        ("2bit", "laplace", 0.110, 1.07),
        ("2bit", "student", 0.158, 1.07),
        ("4bit", "normal", 0.019, 1.4),
        ("4bit", "laplace", 0.033, 1.4),
        ("4bit", "student", 0.047, 1.5),
    ],
)
def test_the_relative_error(name: str, kind: str, stated: float, over_free: float) -> None:
    generator, shape = np.random.default_rng(0), (200, 4096)
    draw = {
        "normal": generator.standard_normal(shape),
        "laplace": generator.laplace(size=shape),
        "student": generator.standard_t(5, shape),
    }[kind]
    magnitudes = np.sort(np.abs(draw), axis=1)[:, -64:]
    signs = generator.choice([-1.0, 1.0], magnitudes.shape)
    _, result = coded(LEVELS[name], (magnitudes * signs).ravel(), [64] * 200)
    difference = magnitudes * signs - result.reshape(magnitudes.shape)
    norm = np.linalg.norm(magnitudes)
    assert np.linalg.norm(difference) / norm == pytest.approx(stated, rel=0.06)
    free = free_levels(magnitudes, 1 << (LEVELS[name].width - 1)).sum() ** 0.5
    assert np.linalg.norm(difference) <= over_free * free


@every_format
@settings(deadline=None)
@given(
    numbers=arrays.arrays(
        np.float32, st.integers(1, 40), elements=st.floats(allow_nan=False, allow_infinity=False, width=32).filter(bool)
    ),
    cut=st.integers(0, 40),
)
def test_every_value_takes_its_nearest_level(values: Levels, numbers: Float32Vector, cut: int) -> None:
    cut = min(cut, len(numbers))
    scales, result = coded(values, numbers, [cut, len(numbers) - cut])
    assert np.isfinite(result).all()
    words, levels = np.frombuffer(scales, "<u2"), 1 << (values.width - 1)
    for word, own, taken in zip(words, np.split(numbers, [cut]), np.split(result, [cut]), strict=True):
        code = np.arange(levels, dtype=np.uint32) << 1
        magnitudes = values.decode(memoryview(word.tobytes()), code, np.array([levels], np.int32)).astype(np.float64)
        nearest = np.abs(np.abs(own.astype(np.float64))[:, None] - magnitudes).min(1, initial=np.inf)
        np.testing.assert_array_equal(np.abs(own.astype(np.float64) - taken), nearest)
        np.testing.assert_array_equal(np.signbit(own), np.signbit(taken))


@every_format
@pytest.mark.parametrize("magnitude", [1.0, 1.5, 2.0**-126, 2.0**100, 1.9375 * 2.0**126])
def test_equal_magnitudes_of_four_bits_are_exact(values: Levels, magnitude: float) -> None:
    numbers = np.array([magnitude, -magnitude, magnitude])
    np.testing.assert_array_equal(coded(values, numbers, [3])[1], numbers)


@every_format
def test_the_largest_and_the_smallest_numbers(values: Levels) -> None:
    largest = np.finfo(np.float32).max
    scales, result = coded(values, np.array([largest, -largest, 1e-45, -1e-45, 1.0]), [2, 2, 1])
    np.testing.assert_allclose(result[:2], [largest, -largest], rtol=0.13)
    np.testing.assert_array_equal(result[2:4], 0)  # stay with the sender
    assert scales[2:4] == bytes(2)


@pytest.mark.parametrize(("name", "unit"), [("2bit", 8), ("4bit", 64)])
def test_levels_are_rounded_once(name: str, unit: int) -> None:
    """So that they are the same wherever they are computed."""
    codes, counts = np.arange(1 << (LEVELS[name].width - 1), dtype=np.uint32) << 1, np.array([0], np.int32)
    counts[0] = len(codes)
    for number, step in enumerate([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]):
        word = np.array([0x7F00 | number], dtype="<u2").tobytes()
        exact = [Fraction(unit + step, unit) ** j for j in range(len(codes))]
        got = LEVELS[name].decode(memoryview(word), codes, counts)
        for level, fraction in zip(got, exact, strict=True):
            assert abs(Fraction(float(level)) - fraction) <= Fraction(float(np.spacing(level))) / 2


@every_format
@pytest.mark.parametrize("word", [0x0001, 0x0010, 0x00FF, 0xFF00, 0xFFFF])
def test_scales_that_are_not_normal_numbers_are_refused(values: Levels, word: int) -> None:
    with pytest.raises(ValueError, match=r"not finite|below the normal"):
        values.decode(memoryview(word.to_bytes(2, "little")), np.zeros(1, np.uint32), np.ones(1, np.int32))
