"""Top-k: of each chunk of consecutive elements those of largest magnitude, the rest being zeros.

What is not sent is the error that ``encode`` gives back, for error feedback to add to the next vector.
Sources: Aji and Heafield, "Sparse communication for distributed gradient descent" (2017), for sparsity with
feedback; Sarfi, Thérien, Lidin and Belilovsky, "Communication efficient LLM pre-training with SparseLoCo" (2025,
arXiv 2508.15706), for selecting by chunk, in time linear in the vector, and values of 2 bits.

The payload is a scale for each chunk (`Levels`), then a stream of positions and values (`rice`). At 64 of
4096 and 2 bits it takes 0.0191 bytes per element, at most 0.0200 however the positions lie; the
entropy of random positions and the values alone are 0.0183.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.codec import BEYOND_FLOAT32, Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.levels import VALUES
from paddlenlp_nebula.codec.numbers import whole
from paddlenlp_nebula.codec.rice import Entries, Grid, pack, unpack
from paddlenlp_nebula.errors import ProtocolError

__all__ = ["TopK"]

LARGEST_CHUNK = 65536


class TopK(Codec):
    """The ``kept`` elements of largest magnitude of each ``chunk`` consecutive ones.

    A last chunk of n elements has ceil(kept * n / chunk). Of equal magnitudes the first ones are sent;
    zeros are not. ``add`` touches only the elements that were sent.

    Args:
        kept: K, from 1 to ``chunk``.
        chunk: CHUNK, at most 65536; cut regardless of where tensors begin.
        values: a name in `VALUES`. With fp16, magnitudes below 3e-8 travel as zeros and stay in the
            error; the formats of 1 to 4 bits have the range of float32.

    Attributes:
        kept, chunk: as given.
        values: the format.
    """

    grammar = f"topk:K/CHUNK[,{'|'.join(VALUES)}]"

    def __init__(self, kept: int, chunk: int, values: str = "fp16") -> None:
        self.kept, self.chunk, self.values = kept, chunk, VALUES[values]
        self.sends_all = kept == chunk
        self.spec = f"topk:{kept}/{chunk}" + ("" if values == "fp16" else f",{values}")

    @classmethod
    def parse(cls, options: Sequence[str]) -> TopK:
        kept, slash, chunk = (options[0] if options else "").partition("/")
        if not slash or not 1 <= whole(kept) <= whole(chunk) <= LARGEST_CHUNK:
            raise ValueError(f"K/CHUNK must be whole numbers, 1 <= K <= CHUNK <= {LARGEST_CHUNK}")
        if len(options) > 2 or (len(options) == 2 and options[1] not in VALUES):
            raise ValueError(f"K/CHUNK may be followed by one of {', '.join(VALUES)}")
        return cls(whole(kept), whole(chunk), *options[1:])

    def init(self, layout: Layout) -> State:
        from paddlenlp_nebula.codec.kernels import levels, rice, topk  # noqa: F401  compiles them now, not in a round

        return {}

    def estimate(self, layout: Layout) -> int:
        grid = self.grid(layout)
        return self._scale_bytes(grid) + ceil(grid.expected_bits(self.values.width) / 8)

    def bound(self, layout: Layout) -> int:
        grid = self.grid(layout)
        return self._scale_bytes(grid) + ceil(grid.most_bits(self.values.width) / 8)

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        from paddlenlp_nebula.codec.kernels import topk as kernels

        grid = self.grid(layout)
        positions = np.empty(grid.capacity, dtype=np.int64)
        values = np.empty(grid.capacity, dtype=np.float32)
        counts = np.empty(grid.chunks, dtype=np.int32)
        total = kernels.select(vector, self.kept, self.chunk, positions, values, counts)
        entries, values = Entries(positions[:total], counts), values[:total]
        if not np.isfinite(values).all():  # the largest are among them, so no other element needs to be looked at
            raise OverflowError(BEYOND_FLOAT32)
        scales, codes, decoded = self.values.encode(values, counts)
        stream = pack(entries, codes, self.values.width, grid)
        if error is not None:
            if error is not vector:
                np.copyto(error, vector)
            error[entries.positions] = values - decoded
        return memoryview(b"".join((scales, stream)))

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        positions, values = self.entries(payload, layout)
        out = np.zeros(layout.numel, dtype=np.float32)
        out[positions] = values
        return out

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        """As `Codec.add`, but that a zero of ``out`` keeps its sign where nothing was sent."""
        positions, values = self.entries(payload, layout)
        out[positions] += weight * values

    def grid(self, layout: Layout) -> Grid:
        """How a vector is cut, and how many entries it may have."""
        return Grid(layout.numel, self.kept, self.chunk)

    def _scale_bytes(self, grid: Grid) -> int:
        return grid.chunks * self.values.scale_bytes

    def entries(self, payload: memoryview, layout: Layout) -> tuple[npt.NDArray[np.int64], Float32Vector]:
        """Positions, ascending, and values of the elements that were sent.

        Raises:
            ProtocolError: as for ``decode``.
        """
        grid = self.grid(layout)
        scale_bytes = self._scale_bytes(grid)
        try:
            if payload.nbytes < scale_bytes:
                raise ValueError(f"fewer than their {scale_bytes} bytes of scales")
            entries, codes = unpack(payload[scale_bytes:], self.values.width, grid)
            return entries.positions, self.values.decode(payload[:scale_bytes], codes, entries.counts)
        except ValueError as error:
            raise ProtocolError(
                f"{layout.numel} elements as {self.spec} must be scales and a stream of codes, got {payload.nbytes} "
                f"bytes with {error}"
            ) from None
