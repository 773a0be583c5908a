"""The contract of every codec: a float32 vector to bytes and back, without state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Codec", "Float32Vector"]

Float32Vector: TypeAlias = npt.NDArray[np.float32]


class Codec(ABC):
    """Encodes one bucket at a time.

    Attributes:
        spec: the text that names it in ``sync_codec``.
        lossless: whether decode(encode(x)) == x for every finite float32 x.
    """

    spec: str
    lossless: bool = False

    @abstractmethod
    def estimate(self, numel: int) -> int:
        """Bytes of an encoded vector of ``numel`` elements (exact for casts)."""

    @abstractmethod
    def encode(self, vector: Float32Vector) -> memoryview:
        """Bytes for a contiguous float32 vector of shape (numel,), all finite.

        The returned buffer may be ``vector``'s own memory.

        Raises:
            OverflowError: a value does not fit into the wire format.
        """

    @abstractmethod
    def decode(self, payload: memoryview, numel: int) -> Float32Vector:
        """The float32 vector of shape (numel,) that ``payload`` stands for; may be a read-only view of it.

        Raises:
            ProtocolError: the payload is not what ``encode`` produces for ``numel`` elements.
        """
