"""The contract of every kind of knowledge: arrays to bytes and back.

Both sides know beforehand what an answer must cover (`Extent`), so that a payload says nothing about its own size:
whatever its bytes are, decoding allocates what the extent calls for and no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["Arrays", "Extent", "Knowledge"]

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""Name -> array; which names, shapes and dtypes is said by each kind."""


@dataclass(frozen=True)
class Extent:
    """What an answer must cover.

    Attributes:
        rows: positions that count (`places`); samples, for a classifier.
        samples: of the batch.
        vocabulary: tokens that teacher and student share, or classes.
        width: of the teacher's hidden states.
        longest: tokens of a generated sequence at most.
    """

    rows: int
    samples: int = 0
    vocabulary: int = 0
    width: int = 0
    longest: int = 0


class Knowledge(ABC):
    """One kind of knowledge; holds settings only.

    Attributes:
        grammar: how ``distill_knowledge`` names it, for messages and documentation.
        spec: the text that names this one, in its shortest form.
    """

    grammar: ClassVar[str]
    spec: str

    @classmethod
    @abstractmethod
    def parse(cls, options: Sequence[str]) -> Knowledge:
        """From the comma-separated options that follow the colon of a spec.

        Raises:
            ValueError: saying, as the end of a sentence, what an option must be.
        """

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the arrays."""

    @abstractmethod
    def estimate(self, extent: Extent) -> int:
        """Bytes to expect: exact, or the mean where the size varies."""

    @abstractmethod
    def bound(self, extent: Extent) -> int:
        """Bytes at most; a longer payload is refused unread."""

    @abstractmethod
    def memory(self, extent: Extent) -> int:
        """Bytes that decoding allocates at most, whatever the payload."""

    @abstractmethod
    def encode(self, arrays: Mapping[str, npt.NDArray[Any]], extent: Extent) -> memoryview:
        """Bytes for arrays that cover the extent.

        Raises:
            NebulaError: an array is missing, of another shape, or has something in it that does not travel (NaN).
        """

    @abstractmethod
    def decode(self, payload: memoryview, extent: Extent) -> Arrays:
        """The arrays that a payload stands for; nothing of it is trusted.

        Raises:
            ProtocolError: it is not what ``encode`` makes for this extent.
        """

    def check_length(self, payload: memoryview, extent: Extent) -> None:
        """Whether a payload may be read at all.

        Raises:
            ProtocolError: it is longer than any for this extent.
        """
        if payload.nbytes > self.bound(extent):
            raise self.refusal(extent, f"at most {self.bound(extent)} bytes", f"{payload.nbytes}")

    def refusal(self, extent: Extent, expected: str, got: str) -> ProtocolError:
        """The error about a payload: what it must be, and what it is."""
        return ProtocolError(f"{extent.rows} rows of {self.spec} must be {expected}, got {got}")

    def take(
        self, arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """An array to encode, contiguous and of this dtype.

        Raises:
            NebulaError: it is missing, of another shape, or not finite.
        """
        if name not in arrays:
            raise NebulaError(f"{self.spec} is made of {', '.join(self.names())}, got {', '.join(arrays) or 'nothing'}")
        array = np.asarray(arrays[name])
        if array.shape != shape:
            raise NebulaError(f"{name!r} of {self.spec} must have the shape {list(shape)}, got {list(array.shape)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            raise NebulaError(f"{name!r} of {self.spec} must be finite numbers, got {array[bad]} in row {bad[0]}")
        return np.ascontiguousarray(array, dtype=dtype)
