"""Golomb-Rice coded entries of a sparse vector: which elements are there, and a short code for each.

The vector is cut into chunks of CHUNK elements, the last may be shorter; of a chunk of n elements at most
k = ceil(K n / CHUNK) have an entry. The stream of bits, from the least significant one of each byte:

    chunk: "0" if it has k entries; else "1" and their number in as many bits as k - 1 needs
    entry: gap >> p zeros, a one, the p low bits of gap, then the code of the entry's value

The gap is the number of elements skipped since the entry before. The parameter p is such that 2^p is the
largest power of two not above the mean gap, (CHUNK - K) / K: for 64 of 4096, p is 5, and an index takes
7.53 bits at random positions, against log2(4096 choose 64) / 64 = 7.36, and 7.97 bits at most.

Source: Golomb, "Run-length encodings" (1966); Rice and Plaunt, "Adaptive variable-length coding" (1971).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, lgamma

import numpy as np
import numpy.typing as npt

__all__ = ["Entries", "Grid", "pack", "unpack"]


@dataclass(frozen=True)
class Entries:
    """Entries of a vector, in order of position.

    Attributes:
        positions: int64, shape (entries,).
        counts: entries of each chunk, int32, shape (chunks,).
    """

    positions: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Grid:
    """At most ``kept`` of each ``chunk`` consecutive elements.

    Attributes:
        numel: elements of the vector.
        kept: K, from 1 to ``chunk``.
        chunk: CHUNK, at most 2^31 (a vocabulary, say; top-k's is at most 65536).
    """

    numel: int
    kept: int
    chunk: int

    @property
    def chunks(self) -> int:
        """The vector's, the last one maybe shorter."""
        return -(-self.numel // self.chunk)

    @property
    def parameter(self) -> int:
        """The Rice parameter p."""
        return max(((self.chunk - self.kept) // self.kept).bit_length() - 1, 0)

    @property
    def capacity(self) -> int:
        """Entries at most."""
        return sum(number * kept for number, _, kept in self._parts)

    @cached_property
    def _parts(self) -> list[tuple[int, int, int]]:
        """(how many chunks, their elements, their entries at most): the full chunks, and the last if shorter."""
        full, rest = divmod(self.numel, self.chunk)
        return [(full, self.chunk, self.kept), (int(rest > 0), rest, -(-self.kept * rest // self.chunk))]

    def expected_bits(self, width: int) -> float:
        """Mean length of a stream with as many entries as there may be, at random positions."""
        return sum(
            number * (1 + kept * (1 + self.parameter + width + _mean_run(numel, kept, self.parameter)))
            for number, numel, kept in self._parts
            if number
        )

    def most_bits(self, width: int) -> int:
        """Length of a stream at most, with codes of ``width`` bits."""

        def entries(numel: int, kept: int) -> int:
            return kept * (1 + self.parameter + width) + ((numel - kept) >> self.parameter)

        return sum(
            number * max(1 + entries(numel, kept), 1 + (kept - 1).bit_length() + entries(numel, kept - 1))
            for number, numel, kept in self._parts
            if number
        )


@cache
def _mean_run(numel: int, kept: int, parameter: int) -> float:
    """The mean of gap >> parameter: the sum over j >= 1 of the probability of a gap >= j 2^parameter."""

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    step = 1 << parameter
    return sum(
        exp(log_choose(numel - gap, kept) - log_choose(numel, kept)) for gap in range(step, numel - kept + 1, step)
    )


def pack(entries: Entries, codes: npt.NDArray[np.uint32], width: int, grid: Grid) -> memoryview:
    """The stream, in whole bytes, the last one filled with zeros.

    Args:
        entries: within ``grid``.
        codes: one for each entry, below 2^width.
        width: bits of a code, at most 32.
    """
    from paddlenlp_nebula.codec.kernels import rice as kernels

    words = np.zeros(grid.most_bits(width) // 64 + 2, dtype=np.uint64)
    bits = kernels.pack(
        entries.positions, entries.counts, codes, width, grid.numel, grid.kept, grid.chunk, grid.parameter, words
    )
    return words[: bits // 64 + 1].astype("<u8", copy=False).data.cast("B")[: -(-bits // 8)]


def unpack(stream: memoryview, width: int, grid: Grid) -> tuple[Entries, npt.NDArray[np.uint32]]:
    """The entries and codes of a stream.

    Args:
        stream: any bytes, contiguous.
        width: bits of a code, at most 32.
        grid: how the vector is cut.

    Raises:
        ValueError: it is not what ``pack`` gives for this grid: a position or number is out of range, or
            it ends before the last entry, or goes on after it.
    """
    from paddlenlp_nebula.codec.kernels import rice as kernels

    words = np.zeros(stream.nbytes // 8 + 3, dtype="<u8")  # two words of zeros after it, see the kernel
    words.view(np.uint8)[: stream.nbytes] = stream
    positions = np.empty(grid.capacity, dtype=np.int64)
    codes = np.empty(grid.capacity, dtype=np.uint32)
    counts = np.empty(grid.chunks, dtype=np.int32)
    bits = kernels.unpack(
        words.astype(np.uint64, copy=False),
        8 * stream.nbytes,
        width,
        grid.numel,
        grid.kept,
        grid.chunk,
        grid.parameter,
        positions,
        counts,
        codes,
    )
    if bits < 0:
        raise ValueError("a stream of codes that ends early or points outside")
    if 8 * stream.nbytes - bits >= 8 or (bits % 8 and stream[-1] >> bits % 8):
        raise ValueError(f"{stream.nbytes - -(-bits // 8)} bytes after its last code")
    total = int(counts.sum())
    return Entries(positions[:total], counts), codes[:total]
