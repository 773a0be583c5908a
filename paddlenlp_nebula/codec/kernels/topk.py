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
Places: TypeAlias = npt.NDArray[np.uint16]
Octets: TypeAlias = npt.NDArray[np.uint8]

_MAGNITUDE = 0x7FFFFFFF


@njit()
def _reaching(bits: Words, low: np.uint32) -> np.int32:
    """How many magnitudes are ``low`` or more."""
    count = np.int32(0)
    for j in range(len(bits)):
        count += np.int32(np.uint32(bits[j] & np.uint32(_MAGNITUDE)) >= low)
    return count


@njit()
def _lower_bound(bits: Words, kept: int, maxima: Words) -> np.uint32:
    """The smallest of the maxima of ``kept`` stripes: as many elements reach it, and not many more."""
    for j in range(kept):
        maxima[j] = bits[j] & np.uint32(_MAGNITUDE)
    for start in range(kept, len(bits), kept):
        row = bits[start : start + kept]
        for j in range(len(row)):
            maxima[j] = max(maxima[j], np.uint32(row[j] & np.uint32(_MAGNITUDE)))
    return np.uint32(maxima[:kept].min())


@njit()
def _collect(bits: Words, low: np.uint32, flags: Octets, busy: Places, candidates: Words, places: Places) -> int:
    """Writes the magnitudes from ``low`` on, and where they are; returns how many.

    A flag for each element, by vector instructions; then those eights of elements that have one set; then
    their elements; without branches, which would be guessed wrong.
    """
    for j in range(len(bits)):
        flags[j] = np.uint32(bits[j] & np.uint32(_MAGNITUDE)) >= low
    flags[len(bits) :] = 0
    eights = flags.view(np.uint64)
    many = found = 0
    for i in range(len(eights)):
        busy[many] = i
        many += int(eights[i] != 0)
    for i in range(many):
        first = 8 * int(np.int64(busy[i]))
        for j in range(first, min(first + 8, len(bits))):
            candidates[found], places[found] = bits[j] & np.uint32(_MAGNITUDE), j
            found += int(np.int64(flags[j]))
    return found


@njit()
def _threshold(candidates: Words, kept: int, low: np.uint32) -> np.uint32:
    """The kept-th largest candidate, or a number that exactly ``kept`` reach: found by halving the interval."""
    below, above = np.int64(low), np.int64(candidates.max()) + 1  # kept or more reach the former, none the latter
    while above - below > 1:
        middle = (below + above) // 2
        count = _reaching(candidates, np.uint32(middle))
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
    flags = np.empty(chunk // 8 * 8 + 8, np.uint8)
    busy = np.empty(len(flags) // 8, np.uint16)
    space, places = np.empty(chunk + 1, np.uint32), np.empty(chunk + 1, np.uint16)
    low = np.uint32(0)
    total = 0
    for b in range(len(counts)):
        start = b * chunk
        x = bits[start : start + chunk]
        most = (kept * len(x) + chunk - 1) // chunk
        # A little less than the threshold of the chunk before is mostly a closer lower bound than the stripes'.
        if low == 0 or not most <= _reaching(x, low) <= 3 * most:
            low = max(_lower_bound(x, most, maxima), np.uint32(1))
        found = _collect(x, low, flags, busy, space, places)
        candidates = space[:found]
        threshold = _threshold(candidates, most, low) if found > most else low
        spare = most - int(_reaching(candidates, np.uint32(threshold + np.uint32(1))))
        taken = 0
        for j in range(found):
            tie = candidates[j] == threshold
            places[taken] = places[j]
            taken += int((candidates[j] > threshold) | (tie & (spare > 0)))
            spare -= int(tie)
        for j in range(taken):
            position = start + np.int64(places[j])
            positions[total + j], values[total + j] = position, vector[position]
        counts[b] = taken
        total += taken
        low = threshold - min(threshold, np.uint32(1 << 19))
    return total
