"""Casts: the same numbers with fewer bits, little-endian on the wire."""

from __future__ import annotations

import numpy as np

from paddlenlp_nebula.codec.codec import Codec, Float32Vector
from paddlenlp_nebula.errors import ProtocolError

__all__ = ["Bfloat16", "Float16", "Float32"]


def _view(payload: memoryview, numel: int, dtype: str, spec: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    wanted = numel * np.dtype(dtype).itemsize
    if payload.nbytes != wanted:
        raise ProtocolError(f"{numel} elements as {spec} must be {wanted} bytes, got {payload.nbytes}")
    return np.frombuffer(payload, dtype=dtype)


class Float32(Codec):
    """The numbers as they are."""

    spec = "fp32"
    lossless = True

    def estimate(self, numel: int) -> int:
        return 4 * numel

    def encode(self, vector: Float32Vector) -> memoryview:
        return vector.astype("<f4", copy=False).data.cast("B")

    def decode(self, payload: memoryview, numel: int) -> Float32Vector:
        return _view(payload, numel, "<f4", self.spec).astype(np.float32, copy=False)


class Float16(Codec):
    """IEEE half precision: 10 bits of mantissa, largest value 65504."""

    spec = "fp16"

    def estimate(self, numel: int) -> int:
        return 2 * numel

    def encode(self, vector: Float32Vector) -> memoryview:
        with np.errstate(over="ignore"):
            half = vector.astype("<f2")
        if not np.isfinite(half).all():
            raise OverflowError(f"its largest magnitude {float(np.abs(vector).max()):g} exceeds fp16's 65504: use bf16")
        return half.data.cast("B")

    def decode(self, payload: memoryview, numel: int) -> Float32Vector:
        return _view(payload, numel, "<f2", self.spec).astype(np.float32)


class Bfloat16(Codec):
    """The upper half of a float32, rounded to nearest even: float32's range, 7 bits of mantissa."""

    spec = "bf16"

    def estimate(self, numel: int) -> int:
        return 2 * numel

    def encode(self, vector: Float32Vector) -> memoryview:
        bits = vector.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)
        half = rounded.astype("<u2")
        if ((half & 0x7F80) == 0x7F80).any():  # a value within half a unit of float32's largest
            raise OverflowError(
                f"its largest magnitude {float(np.abs(vector).max()):g} rounds to infinity in bf16: use fp32"
            )
        return half.data.cast("B")

    def decode(self, payload: memoryview, numel: int) -> Float32Vector:
        bits = _view(payload, numel, "<u2", self.spec).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
