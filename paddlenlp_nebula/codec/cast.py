"""Casts: the same numbers with fewer bits, little-endian on the wire."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn

__all__ = ["Bfloat16", "Cast", "Float16", "Float32"]


class Cast(Codec):
    """One number on the wire for each number in the vector.

    Attributes:
        wire: the numpy dtype of the numbers on the wire.
    """

    wire: ClassVar[str]

    def __init__(self) -> None:
        self.spec = self.grammar

    @classmethod
    def parse(cls, options: Sequence[str]) -> Cast:
        if options:
            raise ValueError(f"{cls.grammar} takes no options")
        return cls()

    def estimate(self, layout: Layout) -> int:
        return layout.numel * np.dtype(self.wire).itemsize

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        numbers = self._narrow(vector)
        if error is not None:
            np.subtract(vector, self._widen(numbers), out=error)
        return numbers.data.cast("B")

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        self.check_size(payload, layout)
        return self._widen(np.frombuffer(payload, dtype=self.wire))

    def check_range(self, numbers: npt.NDArray[Any], largest: Callable[[], float]) -> None:
        """Look for numbers on the wire that became infinite.

        Args:
            numbers: of dtype ``wire``.
            largest: gives the largest magnitude of the vector they stand for.

        Raises:
            OverflowError: there are some.
        """
        return  # of float32 there are none

    @abstractmethod
    def _narrow(self, vector: Float32Vector) -> np.ndarray[tuple[int], np.dtype[np.generic]]: ...

    @abstractmethod
    def _widen(self, numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Float32Vector: ...


class Float32(Cast):
    """The numbers as they are."""

    grammar = "fp32"
    wire = "<f4"
    lossless = True

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        if error is vector:
            vector = vector.copy()
        payload = vector.astype(self.wire, copy=False).data.cast("B")
        if error is not None:
            error.fill(0.0)
        return payload

    def _narrow(self, vector: Float32Vector) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        return vector.astype(self.wire, copy=False)

    def _widen(self, numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Float32Vector:
        return numbers.astype(np.float32, copy=False)


class Float16(Cast):
    """IEEE half precision: 10 bits of mantissa, largest value 65504."""

    grammar = "fp16"
    wire = "<f2"

    def check_range(self, numbers: npt.NDArray[Any], largest: Callable[[], float]) -> None:
        if not np.isfinite(numbers).all():
            raise OverflowError(f"its largest magnitude {largest():g} exceeds fp16's 65504: use bf16")

    def _narrow(self, vector: Float32Vector) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        with np.errstate(over="ignore"):
            half = vector.astype("<f2")
        self.check_range(half, lambda: float(np.abs(vector).max()))
        return half

    def _widen(self, numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Float32Vector:
        return numbers.astype(np.float32)


class Bfloat16(Cast):
    """The upper half of a float32, rounded to nearest even: float32's range, 7 bits of mantissa."""

    grammar = "bf16"
    wire = "<u2"

    def check_range(self, numbers: npt.NDArray[Any], largest: Callable[[], float]) -> None:
        if ((numbers & 0x7F80) == 0x7F80).any():  # a value within half a unit of float32's largest
            raise OverflowError(f"its largest magnitude {largest():g} rounds to infinity in bf16: use fp32")

    def _narrow(self, vector: Float32Vector) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        bits = vector.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        half = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype("<u2")
        self.check_range(half, lambda: float(np.abs(vector).max()))
        return half

    def _widen(self, numbers: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Float32Vector:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
