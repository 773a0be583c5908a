"""Kernel that selects the elements of largest magnitude.

Bit patterns of finite magnitudes are ordered as the magnitudes are, so all comparisons are of integers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types

from paddlenlp_nebula.codec.kernels import FLOATS_IN, kernel

__all__ = ["select"]

Floats: TypeAlias = npt.NDArray[np.float32]
Words: TypeAlias = npt.NDArray[np.uint32]

_MAGNITUDE = 0x7FFFFFFF


@njit()
def _at_least(numbers: Words, threshold: np.uint32) -> np.int32:
    count = np.int32(0)
    for i in range(len(numbers)):
        count += np.int32(numbers[i] >= threshold)
    return count


@njit()
def _lower_bound(bits: Words, kept: int, maxima: Words) -> tuple[np.uint32, np.uint32]:
    """The smallest of the maxima of ``kept`` stripes, and the largest. As many elements are at least the former."""
    for j in range(kept):
        maxima[j] = bits[j] & np.uint32(_MAGNITUDE)
    start = kept
    while start < len(bits):
        row = bits[start : start + kept]
        for j in range(len(row)):
            maxima[j] = max(maxima[j], np.uint32(row[j] & np.uint32(_MAGNITUDE)))
        start += kept
    low = high = maxima[0]
    for j in range(1, kept):
        low, high = min(low, maxima[j]), max(high, maxima[j])
    return low, high


@njit()
def _threshold(candidates: Words, kept: int, low: np.uint32, high: np.uint32) -> np.uint32:
    """The kept-th largest of the candidates, found by halving the interval; or a lower bound that exactly ``kept`` reach."""
    below, above = np.int64(low), np.int64(high) + 1  # kept or more reach the former, fewer the latter
    while above - below > 1:
        middle = (below + above) // 2
        count = _at_least(candidates, np.uint32(middle))
        if count == kept:
            return np.uint32(middle)
        if count > kept:
            below = middle
        else:
            above = middle
    return np.uint32(below)


@kernel(types.int64(FLOATS_IN, types.int64, types.int64, types.int64[::1], types.float32[::1], types.int32[::1]))
def select(
    vector: Floats,
    kept: int,
    chunk: int,
    positions: npt.NDArray[np.int64],
    values: Floats,
    counts: npt.NDArray[np.int32],
) -> int:
    """The ceil(kept n / chunk) elements of largest magnitude of each chunk of n elements, without zeros.

    Of equal magnitudes the first ones are taken.

    Args:
        vector: finite.
        kept, chunk: 1 <= kept <= chunk <= 65536.
        positions, values: receive the elements in order of position; room for all that there may be.
        counts: receives how many each chunk has, shape (chunks,).

    Returns:
        How many in all.
    """
    bits = vector.view(np.uint32)
    maxima = np.empty(kept, np.uint32)
    space = np.empty(chunk, np.uint32)
    places = np.empty(chunk, np.uint16)
    total = 0
    for b in range(len(counts)):
        start = b * chunk
        x = bits[start : start + chunk]
        most = (kept * len(x) + chunk - 1) // chunk
        low, high = _lower_bound(x, most, maxima)
        low = max(low, np.uint32(1))
        found = 0
        for j in range(len(x)):
            magnitude = np.uint32(x[j] & np.uint32(_MAGNITUDE))
            space[found], places[found] = magnitude, j
            found += int(magnitude >= low)
        candidates = space[:found]
        threshold = low if found <= most else _threshold(candidates, most, low, high)
        spare = most - int(_at_least(candidates, np.uint32(threshold + np.uint32(1))))
        first = total
        for j in range(found):
            magnitude = candidates[j]
            tie = magnitude == threshold
            if (magnitude > threshold) | (tie & (spare > 0)):
                position = start + np.int64(places[j])
                positions[total], values[total] = position, vector[position]
                total += 1
            spare -= tie
        counts[b] = total - first
    return total
