"""Fixed-point numbers in the ring of integers modulo 2^32 or 2^64, where a sum does not depend on its order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.privacy.gaussian import LARGEST_NORMAL

__all__ = ["FixedPoint", "Ring", "fixed_point_for"]

Ring: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Integers modulo 2^bits; numpy's sums and differences of unsigned arrays wrap around."""


@dataclass(frozen=True)
class FixedPoint:
    """Multiples of a step.

    Attributes:
        bits: of an integer: 32 or 64.
        step: a power of two, so that multiplying by it is exact.
    """

    bits: int
    step: float

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Of the integers: little-endian, as on the wire."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def limit(self) -> float:
        """The largest magnitude: a quarter of the ring, so that a mean cannot wrap around, not even by rounding."""
        return self.step * 2.0 ** (self.bits - 2)

    def encode(self, vector: Float32Vector, share: np.float32) -> Ring:
        """``share * vector``, rounded to the nearest multiple of the step.

        Args:
            vector: finite, shape (numel,).
            share: of the member; the members' sum to 1.

        Raises:
            OverflowError: a magnitude exceeds `limit`; its argument is the element's index.
        """
        if (over := np.abs(vector) > self.limit).any():
            raise OverflowError(int(over.argmax()))
        multiples = np.rint(vector.astype(np.float64) * (float(share) / self.step))
        ring: Ring = multiples.astype(f"<i{self.bits // 8}").view(self.dtype)
        return ring

    def decode(self, total: Ring) -> Float32Vector:
        """The numbers that a sum of all members' integers stands for."""
        return (total.view(f"<i{self.bits // 8}") * self.step).astype(np.float32)


def fixed_point_for(clip_norm: float | None, own_noise: float = 0.0) -> FixedPoint:
    """What fits all updates.

    Args:
        clip_norm: bounds every element, and 32 bits then leave a step of 2^-29 of it or less; without a bound there are
            64 bits, for magnitudes up to 2^22 in steps of 2^-40.
        own_noise: standard deviation of the noise that a member adds to each element.
    """
    if clip_norm is None:
        return FixedPoint(64, 2.0**-40)
    largest = clip_norm + LARGEST_NORMAL * own_noise
    return FixedPoint(32, 2.0 ** (math.ceil(math.log2(largest)) - 30))
