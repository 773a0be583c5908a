"""Kernels of the block-wise quantisation codecs.

number = scale x level and level = step x code - offset; the codes lie in 8, 4, 2 or 1 bits:

====  ====  ======  =============
bits  step  offset  levels
====  ====  ======  =============
8     1     128     -127, ..., 127
4     1     8       -7, ..., 7
2     2     3       -3, -1, 1, 3
1     2     1       -1, 1
====  ====  ======  =============

Each step is a plain loop over one block, which lies in the first-level cache, so that LLVM turns it into
vector instructions: no branches, no slices (numba counts their references), unsigned indices (no negative
ones to look for), ``row`` between arrays that may be the same.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit, types

from paddlenlp_nebula.codec.kernels import FLOATS, FLOATS_IN, OCTETS, OCTETS_IN, kernel

__all__ = ["decode", "encode"]

Array: TypeAlias = Any
Number: TypeAlias = Any

_SMALLEST = np.float32(2.0**-126)  # normal, so that processors that flush subnormal numbers decode the same
_LARGEST = np.float32(np.finfo(np.float32).max)
_WHOLE = np.float32(3 << 22)  # a sum with it has no bits after the point: rounded to nearest even, code in its low byte
_HALF = np.float32(0.5)


@njit(forceinline=True)
def _bias(bits: Number) -> Number:
    return np.float32(1 << (bits - 1))


@njit(forceinline=True)
def _cap(bits: Number) -> Number:
    """The largest scale: its products with levels and its inverse are normal float32 numbers."""
    return _LARGEST / max(_bias(bits), np.float32(4))


@njit(forceinline=True)
def _largest(bits: Array, at: Number, numel: Number, word: Array) -> Number:
    """The largest magnitude, by integer comparison: bit patterns of finite magnitudes have the same order."""
    most = np.uint32(0)
    for j in range(numel):
        most = max(most, np.uint32(bits[at + j] & np.uint32(0x7FFFFFFF)))
    word[0] = most
    return word.view(np.float32)[0]


@njit(forceinline=True)
def _mean(x: Array, at: Number, numel: Number, row: Array) -> Number:
    """The mean magnitude, by adding halves to halves; ``row`` is overwritten."""
    share = np.float32(1) / np.float32(numel)
    for j in range(numel):
        row[j] = np.abs(x[at + j]) * share  # before adding, so that large numbers do not overflow
    for j in range(numel, np.uint64(len(row))):
        row[j] = np.float32(0)
    width = np.uint64(len(row)) >> np.uint64(1)
    while width >= np.uint64(8):
        for j in range(width):
            row[j] += row[width + j]
        width >>= np.uint64(1)
    total = np.float32(0)
    for j in range(np.uint64(8)):
        total += row[j]
    return total


@njit(forceinline=True)
def _uniform(index: Number, low: Number, high: Number) -> Number:
    """24 random bits as a float32 in [0, 1), a function of its arguments only.

    The mixer lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018) over the index, with one half of
    the seed before its first and the other half before its second multiplication.
    """
    h = np.uint32(index ^ low)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) + high)
    h = np.uint32(h * np.uint32(0x846CA68B))
    return np.float32(np.uint32(h ^ (h >> np.uint32(16))) >> np.uint32(8)) * np.float32(2.0**-24)


@njit(forceinline=True)
def _nearest(x: Array, at: Number, numel: Number, inverse: Number, bits: Number, row: Array) -> None:
    """row[j] = _WHOLE + the code of x[at + j]."""
    shift = _WHOLE + _bias(bits)
    if bits >= 4:
        for j in range(numel):
            row[j] = x[at + j] * inverse + shift
    else:
        least, most = -_bias(bits), _bias(bits) - np.float32(1)
        for j in range(numel):
            row[j] = min(max(np.floor(x[at + j] * inverse * _HALF), least), most) + shift


@njit(forceinline=True)
def _stochastic(
    x: Array, at: Number, numel: Number, inverse: Number, bits: Number, low: Number, high: Number, row: Array
) -> None:
    """row[j] = _WHOLE + the code of x[at + j], up with the probability that makes its mean x[at + j]."""
    part, middle = (np.float32(1), np.float32(0)) if bits >= 4 else (_HALF, _HALF)
    least, most = np.float32(1) - _bias(bits) - middle - middle, _bias(bits) - np.float32(1)
    shift = _WHOLE + _bias(bits)
    for j in range(numel):
        z = x[at + j] * inverse * part - middle
        below = np.floor(z)
        up = np.float32(_uniform(np.uint32(at + j), low, high) < z - below)
        row[j] = min(max(below + up, least), most) + shift


@njit(forceinline=True)
def _pack(codes: Array, bits: Number, out: Array, at: Number, width: Number) -> None:
    """out[at + j] = the codes of elements j, width + j, 2 width + j, ... from the lowest bits up."""
    for j in range(width):
        out[at + j] = np.uint8(codes[j])
    first, left = width, bits
    while left < np.uint64(8):
        for j in range(width):
            out[at + j] |= np.uint8(codes[first + j] << np.uint32(left & np.uint64(7)))
        first += width
        left += bits


@njit(forceinline=True)
def _rest(x: Array, at: Number, numel: Number, scale: Number, bits: Number, row: Array, error: Array) -> None:
    """error = x - scale x level; by way of ``row``, so that ``error`` may be ``x``."""
    step = np.float32(1 if bits >= 4 else 2)
    odd, shift = step - np.float32(1), _WHOLE + _bias(bits)
    for j in range(numel):
        row[j] = x[at + j] - scale * ((row[j] - shift) * step + odd)
    for j in range(numel):
        error[at + j] = row[j]


@kernel(types.void(FLOATS_IN, FLOATS, FLOATS, OCTETS, types.uint64, types.uint64, *[types.boolean] * 2, types.uint64))
def encode(
    vector: Array,
    error: Array,
    scales: Array,
    packed: Array,
    block: int,
    bits: int,
    by_mean: bool,
    stochastic: bool,
    seed: int,
) -> None:
    """Quantises a vector, block by block.

    Args:
        vector: finite, float32, shape (n,).
        error: receives ``vector`` less what it decodes to, shape (n,), or (0,) if nobody asks; may be ``vector``.
        scales: receives the scales, float32, shape (blocks,).
        packed: receives the codes, as `codec.quantize` lays them out, shape (bytes,).
        block: numbers per scale, a power of two.
        bits: of a code: 1, 2, 4 or 8.
        by_mean: take the scale from the mean magnitude, not from the largest; with 1 and 2 bits only.
        stochastic: round at random; ``by_mean`` is then False.
        seed: of the random numbers, 64 bits.
    """
    row, word = np.empty(block, np.float32), np.empty(1, np.uint32)
    codes, patterns = row.view(np.uint32), vector.view(np.uint32)
    low, high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    top = _bias(bits) - np.float32(1) if bits >= 4 else np.float32(2) * _bias(bits) - np.float32(1)
    least = _WHOLE + np.float32(1 if bits >= 4 else 0)
    most = _WHOLE + np.float32(2) * _bias(bits) - np.float32(1)
    cap, at, start = _cap(bits), np.uint64(0), np.uint64(0)

    # All scales first: a plain read of the bucket, which brings it into the second-level cache at full speed.
    for b in range(len(scales)):
        numel: Number = min(block, np.uint64(len(vector)) - at)
        if by_mean:
            scale = _mean(vector, at, numel, row) * np.float32(0.625 if bits == 2 else 1)
        else:
            scale = _largest(patterns, at, numel, word) / top
        scales[b] = min(scale, cap) if scale >= _SMALLEST else np.float32(0)
        at += block

    at = np.uint64(0)
    for b in range(len(scales)):
        numel = min(block, np.uint64(len(vector)) - at)
        scale = scales[b]
        inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        if stochastic:
            _stochastic(vector, at, numel, inverse, bits, low, high, row)
        else:
            _nearest(vector, at, numel, inverse, bits, row)
        if scale == cap:  # a number may lie beyond the outermost level
            for j in range(numel):
                row[j] = min(max(row[j], least), most)
        width = (numel * bits + np.uint64(7)) >> np.uint64(3)
        for j in range(numel, min(numel + np.uint64(7), block)):
            row[j] = _WHOLE
        _pack(codes, bits, packed, start, width)
        if len(error):
            _rest(vector, at, numel, scale, bits, row, error)
        at += block
        start += width


@njit(forceinline=True)
def _valid(scales: Array, bits: Number) -> bool:
    cap, bad = _cap(bits), 0
    for b in range(len(scales)):
        scale = scales[b]
        bad += not (scale == np.float32(0) or (scale >= _SMALLEST and scale <= cap))
    return bad == 0


@njit(forceinline=True)
def _number(octet: Number, right: Number, bits: Number, scale: Number) -> Number:
    code = (np.int32(octet) >> np.int32(right)) & np.int32((1 << bits) - 1)
    level = code - np.int32(1 << (bits - 1)) if bits >= 4 else code + code - np.int32((1 << bits) - 1)
    return scale * np.float32(level)


@njit(forceinline=True)
def _unpack(
    packed: Array,
    start: Number,
    right: Number,
    bits: Number,
    scale: Number,
    adding: bool,
    weight: Number,
    out: Array,
    at: Number,
    numel: Number,
) -> None:
    """The numbers whose codes begin at bit ``right`` of their bytes."""
    if adding:
        for j in range(numel):
            out[at + j] += weight * _number(packed[start + j], right, bits, scale)
    else:
        for j in range(numel):
            out[at + j] = _number(packed[start + j], right, bits, scale)


@kernel(types.boolean(FLOATS_IN, OCTETS_IN, *[types.uint64] * 2, types.boolean, types.float32, FLOATS))
def decode(scales: Array, packed: Array, block: int, bits: int, adding: bool, weight: float, out: Array) -> bool:
    """``out += weight * numbers`` or, unless ``adding``, ``out = numbers``.

    Args:
        scales, packed, block, bits: as for ``encode``; any bytes.
        adding: see above.
        weight: float32; unused unless ``adding``.
        out: float32, shape (n,).

    Returns:
        False, and nothing is written, if a scale is none that ``encode`` writes.
    """
    if not _valid(scales, bits):
        return False
    at, start = np.uint64(0), np.uint64(0)
    for b in range(len(scales)):
        numel: Number = min(block, np.uint64(len(out)) - at)
        scale = scales[b]
        width = (numel * bits + np.uint64(7)) >> np.uint64(3)
        if bits == 8:  # with constants, the common ones are half as long, and whole blocks as by default faster yet
            if numel == 256:
                _unpack(packed, start, 0, 8, scale, adding, weight, out, at, np.uint64(256))
            else:
                _unpack(packed, start, 0, 8, scale, adding, weight, out, at, numel)
        elif bits == 4:
            if numel == 128:
                _unpack(packed, start, 0, 4, scale, adding, weight, out, at, np.uint64(64))
                _unpack(packed, start, 4, 4, scale, adding, weight, out, at + np.uint64(64), np.uint64(64))
            else:
                _unpack(packed, start, 0, 4, scale, adding, weight, out, at, width)
                _unpack(packed, start, 4, 4, scale, adding, weight, out, at + width, numel - width)
        else:
            first, right = np.uint64(0), np.uint64(0)
            while first < numel:
                group = min(width, numel - first)
                _unpack(packed, start, right & np.uint64(7), bits, scale, adding, weight, out, at + first, group)
                first += width
                right += bits
        at += block
        start += width
    return True
