"""Kernel that fits the levels of `Levels` to the values of a chunk.

Only the sender runs it: what it computes need not be the same on other hardware, what it writes is decoded
elsewhere.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from paddlenlp_nebula.codec.kernels import kernel

__all__ = ["fit"]

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

_PASSES = 4  # more change the error by less than 1 %


@njit()
def _nearest(magnitudes: Doubles, scale: float, ratios: Floats, nearest: npt.NDArray[np.int64]) -> None:
    """The number of the level nearest to each magnitude: that of the thresholds half way that it exceeds."""
    nearest[:] = 0
    for j in range(1, len(ratios)):
        threshold = scale * (np.float64(ratios[j - 1]) + np.float64(ratios[j])) / 2
        for i in range(len(magnitudes)):
            nearest[i] += magnitudes[i] > threshold


@njit()
def _word_of(scale: float, step: int, highest: np.float32, one: Floats) -> int:
    """The 16 bits that say ``scale`` and ``step``; the next smaller scale if the highest level overflows."""
    bits = one.view(np.uint32)
    one[0] = scale
    upper = (np.int64(bits[0]) + (1 << 18)) >> 19
    while True:
        bits[0] = upper << 19
        if np.isfinite(np.float32(one[0] * highest)):
            break
        upper -= 1
    return int((upper << 4) | step) if upper >= 16 else 0  # below are no normal numbers


@kernel("void(float32[::1], int32[::1], float32[:, ::1], uint16[::1], uint32[::1])")
def fit(
    values: Floats,
    counts: npt.NDArray[np.int32],
    ratios: Floats,
    words: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint32],
) -> None:
    """Writes the scale words, shape (chunks,), and the codes, shape (entries,).

    Args:
        values: finite, none of them zero, shape (entries,).
        counts: how many of them belong to each chunk, shape (chunks,).
        ratios: levels over scale, shape (16 steps, levels), ascending.
    """
    levels = ratios.shape[1]
    space = np.empty(counts.max() if len(counts) else 0, np.float64)
    groups = np.empty(len(space), np.int64)
    sums, sizes = np.empty(levels, np.float64), np.empty(levels, np.int64)
    one = np.empty(1, np.float32)
    start = 0
    for b in range(len(counts)):
        count = counts[b]
        if count == 0:
            words[b] = 0
            continue
        magnitudes, nearest = space[:count], groups[:count]
        for i in range(count):
            magnitudes[i] = np.abs(np.float64(values[start + i]))
        low, high = magnitudes.min(), magnitudes.max()
        scale, step = low, 0
        for _ in range(_PASSES):
            step = 0
            while step + 1 < len(ratios) and high / low > (ratios[step, levels - 1] + ratios[step + 1, levels - 1]) / 2:
                step += 1
            _nearest(magnitudes, scale, ratios[step], nearest)
            sums[:], sizes[:] = 0, 0
            for i in range(count):
                sums[nearest[i]] += magnitudes[i]
                sizes[nearest[i]] += 1
            above = below = 0.0
            for j in range(levels):
                ratio = np.float64(ratios[step, j])
                above += ratio * sums[j]
                below += ratio * ratio * sizes[j]
            scale = above / below
            if sizes[0]:
                low = sums[0] / sizes[0]
            if sizes[levels - 1]:
                high = sums[levels - 1] / sizes[levels - 1]
        words[b] = _word_of(scale, step, ratios[step, levels - 1], one)
        _nearest(magnitudes, float(one[0]), ratios[step], nearest)
        for i in range(count):
            codes[start + i] = np.uint32(nearest[i] << 1) | np.uint32(values[start + i] < 0)
        start += count
