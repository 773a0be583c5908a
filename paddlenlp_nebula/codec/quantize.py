"""Block-wise quantisation: a few bits per number, and one scale for each block of them.

Payload, little-endian: the blocks' scales as float32, then the blocks' codes, each block beginning at a
byte of its own. A block of n numbers at b bits takes w = ceil(n b / 8) bytes; byte j holds the codes of
numbers j, w + j, 2 w + j, ... from its lowest bits up. A number is its scale times its level:

=====  ========================================  ========================================
codec  levels (code 0, 1, ...)                   scale
=====  ========================================  ========================================
int8   -127, ..., 127 (code - 128)               largest magnitude / 127
int4   -7, ..., 7 (code - 8)                     largest magnitude / 7
int2   -3, -1, 1, 3                              5/8 of the mean magnitude; stochastic: largest magnitude / 3
sign   -1, 1                                     mean magnitude
=====  ========================================  ========================================

Zero is a level of int8 and int4 only; a block of zeros has the scale 0. So has a block whose scale would be
smaller than 2^-126, the least normal float32: processors may treat smaller ones as zero. Scales end where a
level or an inverse would leave float32 (at 2^-7, 2^-3 or, for int2 and sign, 2^-2 of its largest number).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.codec import BEYOND_FLOAT32, Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.errors import ProtocolError

__all__ = ["Int2", "Int4", "Int8", "Quantization", "Sign"]

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 65536

_NO_ERROR = np.empty(0, dtype=np.float32)
_ONE = np.float32(1)


def _kernels() -> ModuleType:
    """The compiled loops, loaded when first needed: reading a setting needs none."""
    from paddlenlp_nebula.codec.kernels import quantize

    return quantize


class Quantization(Codec, ABC):
    """A float32 scale for each block, and ``bits`` bits for each number.

    Attributes:
        block: numbers per scale, a power of two.
        stochastic: round up or down at random, so that the mean of what is decoded is the number
            (Alistarh et al. 2017, QSGD, arXiv 1610.02132, section 3.1); nearest level otherwise. The random
            numbers are a function of ``Turn.own_seed`` and the number's place.
        bits: bits per number.
        default_block: chosen so that scales add at most 6.25 % to the codes.
        by_mean: whether the scale of nearest rounding comes from the mean magnitude.
    """

    bits: ClassVar[int]
    default_block: ClassVar[int]
    by_mean: ClassVar[bool] = False

    def __init__(self, block: int | None = None, *, stochastic: bool = False) -> None:
        self.block = self.default_block if block is None else block
        if not (SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK and self.block.bit_count() == 1):
            raise ValueError(f"BLOCK must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, got {self.block}")
        self.stochastic = stochastic
        options = [str(self.block)] * (self.block != self.default_block) + ["stochastic"] * stochastic
        self.spec = self.grammar.partition("[")[0] + ":" * bool(options) + ",".join(options)

    @classmethod
    def parse(cls, options: Sequence[str]) -> Quantization:
        blocks = [option for option in options if option != "stochastic"]
        if len(blocks) > 1 or len(options) - len(blocks) > 1:
            raise ValueError("an option is given twice")
        if any(not (block.isascii() and block.isdigit() and len(block) <= 8) for block in blocks):
            raise ValueError(f"an option must be a block size or 'stochastic', got {blocks[0]!r}")
        return cls(*map(int, blocks), stochastic="stochastic" in options)

    def init(self, layout: Layout) -> State:
        _kernels()  # compiled here, not in the first round
        return {}

    def estimate(self, layout: Layout) -> int:
        return 4 * self._blocks(layout) + -(-layout.numel * self.bits // 8)

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        payload = np.empty(self.estimate(layout), dtype=np.uint8)
        scales, codes = self.parts(payload, layout)
        _kernels().encode(
            vector,
            _NO_ERROR if error is None else error,
            scales,
            codes,
            self.block,
            self.bits,
            self.by_mean and not self.stochastic,
            self.stochastic,
            turn.own_seed,
        )
        # Only what is infinite, or nearly so, has the largest scale; if ``vector`` is ``error``, its error is infinite too.
        if (scales == self.scale_range[1]).any() and not np.isfinite(vector).all():
            raise OverflowError(BEYOND_FLOAT32)
        return payload.data

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        out = np.empty(layout.numel, dtype=np.float32)
        self._decode(payload, layout, out, adding=False)
        return out

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        self._decode(payload, layout, out, adding=True, weight=weight)

    @property
    def scale_range(self) -> tuple[np.float32, np.float32]:
        """The least and the largest scale that is not 0."""
        limits = np.finfo(np.float32)
        return limits.tiny, limits.max / np.float32(max(1 << (self.bits - 1), 4))

    def parts(
        self, payload: npt.NDArray[np.uint8], layout: Layout
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Scales and codes, as views."""
        end = 4 * self._blocks(layout)
        return payload[:end].view("<f4"), payload[end:]

    def check_scales(self, scales: npt.NDArray[np.float32]) -> None:
        """Look for a scale that ``encode`` never writes.

        Raises:
            ProtocolError: there is one.
        """
        least, most = self.scale_range
        (bad,) = np.nonzero(~((scales == 0) | ((scales >= least) & (scales <= most))))
        if len(bad):
            raise ProtocolError(
                f"a scale of {self.spec} must be 0 or from {least:.3g} to {most:.3g}, got {scales[bad[0]]:.3g} "
                f"in block {bad[0]}"
            )

    def _blocks(self, layout: Layout) -> int:
        return -(-layout.numel // self.block)

    def _decode(
        self,
        payload: memoryview,
        layout: Layout,
        out: Float32Vector,
        *,
        adding: bool,
        weight: np.float32 = _ONE,
    ) -> None:
        self.check_size(payload, layout)
        scales, codes = self.parts(np.frombuffer(payload, dtype=np.uint8), layout)
        if not _kernels().decode(scales, codes, self.block, self.bits, adding, weight, out):
            self.check_scales(scales)


class Int8(Quantization):
    """255 levels, evenly spaced; 1.016 bytes per number."""

    grammar = "int8[:BLOCK][,stochastic]"
    bits = 8
    default_block = 256


class Int4(Quantization):
    """15 levels, evenly spaced; 0.531 bytes per number."""

    grammar = "int4[:BLOCK][,stochastic]"
    bits = 4
    default_block = 128


class Int2(Quantization):
    """Four levels, evenly spaced around zero; 0.258 bytes per number.

    Nearest rounding takes the levels that lose least of normally distributed numbers, 0.996 standard
    deviations apart (Max 1960, "Quantizing for minimum distortion", table II), and leaves the rest of what is
    beyond them to error feedback. Whatever the distribution, it loses less than the whole:
    |x - Q(x)|^2 <= |x|^2 - 0.859 n m^2 for n numbers of mean magnitude m.
    Stochastic rounding must reach the largest magnitude, so its levels are further apart.
    """

    grammar = "int2[:BLOCK][,stochastic]"
    bits = 2
    default_block = 512
    by_mean = True


class Sign(Quantization):
    """The sign, times the block's mean magnitude (Karimireddy et al. 2019, arXiv 1901.09847); 0.129 bytes per number."""

    grammar = "sign[:BLOCK]"
    bits = 1
    default_block = 1024
    by_mean = True

    @classmethod
    def parse(cls, options: Sequence[str]) -> Quantization:
        if "stochastic" in options:
            raise ValueError("signs are not rounded")
        return super().parse(options)
