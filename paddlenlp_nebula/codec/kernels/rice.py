"""Kernels of the Golomb-Rice code: single bits, so single elements; every index is checked here."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from paddlenlp_nebula.codec.kernels import kernel

__all__ = ["pack", "unpack"]

Words: TypeAlias = npt.NDArray[np.uint64]
Positions: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = npt.NDArray[np.int32]
Codes: TypeAlias = npt.NDArray[np.uint32]

# Position of the only one in a word: word * _DE_BRUIJN has another value in its top 6 bits for each.
# Source: Leiserson, Prokop, Randall, "Using de Bruijn sequences to index a 1 in a computer word" (1998).
_DE_BRUIJN = 0x03F79D71B4CB0A89
_POSITION = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _POSITION[((_DE_BRUIJN << _bit) & (2**64 - 1)) >> 58] = _bit


@njit()
def _put(words: Words, at: int, bits: np.uint64) -> None:
    """Or ``bits`` into the stream from bit ``at``; one word more than they need must be there."""
    index, shift = at >> 6, np.uint64(at & 63)
    words[index] |= bits << shift
    words[index + 1] |= (bits >> np.uint64(1)) >> (np.uint64(63) - shift)


@njit()
def _window(words: Words, at: int) -> np.uint64:
    """The 64 bits from bit ``at``; one word more must be there."""
    index, shift = at >> 6, np.uint64(at & 63)
    return np.uint64((words[index] >> shift) | ((words[index + 1] << np.uint64(1)) << (np.uint64(63) - shift)))


@njit()
def _bits_of(number: int) -> int:
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@kernel("int64(int64[::1], int32[::1], uint32[::1], int64, int64, int64, int64, int64, uint64[::1])")
def pack(
    positions: Positions,
    counts: Counts,
    codes: Codes,
    width: int,
    numel: int,
    kept: int,
    chunk: int,
    parameter: int,
    words: Words,
) -> int:
    """Writes the stream described in `codec.rice`, and returns its length in bits.

    Args:
        positions, counts, codes, width: see `codec.rice.pack`.
        numel, kept, chunk, parameter: those of the `Grid`.
        words: receives the stream; zeros before, and longer than it by a word.
    """
    low = np.int64((1 << parameter) - 1)
    at = entry = 0
    for b in range(len(counts)):
        start = b * chunk
        most = (kept * min(chunk, numel - start) + chunk - 1) // chunk
        count = np.int64(counts[b])
        if count < most:
            _put(words, at, np.uint64(1 | (count << 1)))
            at += _bits_of(most - 1)
        at += 1
        after = start
        for _ in range(count):
            position = positions[entry]
            gap = position - after
            at += gap >> parameter
            bits = (np.uint64(codes[entry]) << np.uint64(parameter)) | np.uint64(gap & low)
            _put(words, at, (bits << np.uint64(1)) | np.uint64(1))
            at += 1 + parameter + width
            after = position + 1
            entry += 1
    return at


@kernel("int64(uint64[::1], int64, int64, int64, int64, int64, int64, int64[::1], int32[::1], uint32[::1])")
def unpack(
    words: Words,
    bits: int,
    width: int,
    numel: int,
    kept: int,
    chunk: int,
    parameter: int,
    positions: Positions,
    counts: Counts,
    codes: Codes,
) -> int:
    """Reads a stream and returns how many bits it took, or -1: it ends early or points outside.

    Args:
        words: the stream, and two words of zeros after it, so that what starts within it may be read to its end
            before the length is compared.
        bits: of the stream.
        width: of a code, in bits.
        numel, kept, chunk, parameter: those of the `Grid`.
        positions, counts, codes: receive the entries; room for ``Grid.capacity`` of them, and for all chunks.
    """
    low, code_mask = np.uint64((1 << parameter) - 1), np.uint64((1 << width) - 1)
    at = entry = 0
    for b in range(len(counts)):
        start = b * chunk
        stop = min(start + chunk, numel)
        most = (kept * (stop - start) + chunk - 1) // chunk
        if at >= bits:
            return -1
        count = np.int64(most)
        window = _window(words, at)
        at += 1
        if window & np.uint64(1):
            size = _bits_of(most - 1)
            count = np.int64((window >> np.uint64(1)) & np.uint64((1 << size) - 1))
            at += size
            if at > bits or count >= most:
                return -1
        counts[b] = count
        after = start
        for _ in range(count):
            run = 0
            while True:
                if at >= bits:
                    return -1
                window = _window(words, at)
                if window:
                    break
                run += 64
                at += 64
            zeros = _POSITION[((window & (~window + np.uint64(1))) * np.uint64(_DE_BRUIJN)) >> np.uint64(58)]
            at += zeros + 1
            if at > bits:
                return -1
            window = _window(words, at)
            at += parameter + width
            position = after + ((run + zeros) << parameter) + np.int64(window & low)
            if at > bits or position >= stop:
                return -1
            positions[entry] = position
            codes[entry] = np.uint32((window >> np.uint64(parameter)) & code_mask)
            after = position + 1
            entry += 1
    return at
