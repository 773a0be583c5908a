"""The values of sparse entries, in few bits: how they travel beside their positions.

The magnitudes kept of a chunk all lie above its threshold, so that levels evenly spaced from zero would
waste codes. A chunk has levels of its own: ``scale * (1 + step)^j`` for j = 0, 1, ... In 16 bits it
says its scale, as the upper 12 bits of a float32 without its sign (8 of exponent, 4 of mantissa: the
range of float32, so that changes of 1e-30 survive), and which of 16 steps. Both are fitted to the values
in the manner of Lloyd's algorithm: the lowest and the highest level move to the means of the values
nearest to them, then the scale to the least squared error. A code is a sign and a level.

Relative error ||x - decoded|| / ||x|| of the 64 largest of 4096, in brackets with free levels fitted by Lloyd's
algorithm to convergence:

    ====  =============  =============  ===============  ======================
    bits  normal         Laplace        Student t, 5 df  levels of a chunk
    ====  =============  =============  ===============  ======================
    1     0.110 (0.109)  0.190 (0.189)  0.280 (0.279)    1
    2     0.063 (0.061)  0.110 (0.107)  0.158 (0.154)    2, ratio 1.125 to 33
    4     0.019 (0.014)  0.033 (0.024)  0.047 (0.034)    8, ratio 1.016 to 5
    ====  =============  =============  ===============  ======================

Source: Lloyd, "Least squares quantization in PCM" (1982); the code is our choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.cast import Cast, Float16, Float32
from paddlenlp_nebula.codec.codec import Float32Vector, Layout, Turn

__all__ = ["VALUES", "Levels", "Plain", "Values"]

Codes = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int32]

_ANY_TURN = Turn(round=0, part=0, member=0)  # a cast asks for none


class Values(ABC):
    """float32 values <-> a code for each, and a scale for each chunk.

    Attributes:
        width: bits of a code.
        scale_bytes: bytes of a chunk's scale.
    """

    width: int
    scale_bytes: int = 0

    @abstractmethod
    def encode(self, values: Float32Vector, counts: Counts) -> tuple[bytes, Codes, Float32Vector]:
        """The scales, the codes and the values that ``decode`` makes of them.

        Args:
            values: finite, none of them zero, shape (entries,).
            counts: how many of them belong to each chunk, shape (chunks,), int32.

        Raises:
            OverflowError: a value does not fit.
        """

    @abstractmethod
    def decode(self, scales: memoryview, codes: Codes, counts: Counts) -> Float32Vector:
        """Values of shape (entries,), from ``counts.size * scale_bytes`` bytes and codes below 2^width.

        Raises:
            ValueError: they stand for no finite number.
        """


class Plain(Values):
    """A code is the number itself, as ``cast`` gives it."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self._word = np.dtype(f"<u{np.dtype(cast.wire).itemsize}")
        self.width = 8 * self._word.itemsize

    def encode(self, values: Float32Vector, counts: Counts) -> tuple[bytes, Codes, Float32Vector]:
        layout = Layout.flat(len(values))
        payload = self.cast.encode(values, layout, {}, _ANY_TURN)
        codes = np.frombuffer(payload, dtype=self._word).astype(np.uint32)
        return b"", codes, self.cast.decode(payload, layout)

    def decode(self, scales: memoryview, codes: Codes, counts: Counts) -> Float32Vector:
        values = self.cast.decode(codes.astype(self._word).data.cast("B"), Layout.flat(len(codes)))
        if not np.isfinite(values).all():
            raise ValueError("a value that is not finite")
        return values


class Levels(Values):
    """A code is a sign (its lowest bit) and the number of a level.

    Args:
        width: bits of a code, from 1 to 4.
        unit: the steps are 1/unit, 2/unit, 3/unit, 4/unit, 6/unit ... 256/unit.

    Attributes:
        ratios: levels over scale, float32, shape (16 steps, levels), ascending.
    """

    scale_bytes = 2

    def __init__(self, width: int, unit: int) -> None:
        self.width = width
        # Quotients of whole numbers, rounded once: the same on all hardware, which powers of floats are not.
        ratios = [[(unit + step) ** j / unit**j for j in range(1 << (width - 1))] for step in _STEPS]
        self.ratios = np.array(ratios, dtype=np.float32)

    def encode(self, values: Float32Vector, counts: Counts) -> tuple[bytes, Codes, Float32Vector]:
        from paddlenlp_nebula.codec.kernels import levels as kernels

        words, codes = np.empty(len(counts), dtype=np.uint16), np.empty(len(values), dtype=np.uint32)
        kernels.fit(values, counts, self.ratios, words, codes)
        scales = words.astype("<u2", copy=False).tobytes()
        return scales, codes, self.decode(memoryview(scales), codes, counts)

    def decode(self, scales: memoryview, codes: Codes, counts: Counts) -> Float32Vector:
        words = np.frombuffer(scales, dtype="<u2").astype(np.uint32)
        scale = ((words >> 4) << 19).view(np.float32)
        if (scale < _SMALLEST)[words != 0].any():  # some processors take those for zeros, others do not
            raise ValueError("a scale below the normal float32")
        with np.errstate(over="ignore", invalid="ignore"):
            levels = scale[:, np.newaxis] * self.ratios[words & 15]
        if not np.isfinite(levels).all():
            raise ValueError("a level that is not finite")
        first = np.arange(len(counts)) * levels.shape[1]
        magnitudes = levels.ravel()[np.repeat(first, counts) + (codes >> 1)]
        values: Float32Vector = (magnitudes.view(np.uint32) | (codes << 31)).view(np.float32)
        return values


_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SMALLEST = np.float32(2.0**-126)

VALUES: dict[str, Values] = {
    "fp32": Plain(Float32()),
    "fp16": Plain(Float16()),
    "4bit": Levels(4, unit=64),
    "2bit": Levels(2, unit=8),
    "1bit": Levels(1, unit=1),
}
"""Name in a spec -> format."""
