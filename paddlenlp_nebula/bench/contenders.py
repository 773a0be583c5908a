"""What `nebula bench codecs` compares: a codec as a round uses it, and the interface that its peers share with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from paddlenlp_nebula.bench.plan import MESSAGE_BYTES
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec

__all__ = ["WEIGHT", "Contender", "Own", "matrices", "slices"]

WEIGHT = np.float32(0.5)
"""This member's share in the average: of two equal clusters."""

_BUCKET_NUMEL = MESSAGE_BYTES // 4
_SIDE = 1000


def slices(numel: int) -> list[Layout]:
    """Buckets that cut tensors anywhere, as `buckets.cut` makes them."""
    return [Layout.flat(min(_BUCKET_NUMEL, numel - start)) for start in range(0, numel, _BUCKET_NUMEL)]


def matrices(numel: int) -> list[Layout]:
    """A bucket for each matrix of shape (1000, 1000), then what remains: rows of 1000, and a vector."""
    layouts = [Layout(((_SIDE, _SIDE),))] * (numel // _SIDE**2)
    rows, rest = divmod(numel % _SIDE**2, _SIDE)
    if rows or rest:
        layouts.append(Layout((((rows, _SIDE),) if rows else ()) + (((rest,),) if rest else ())))
    return layouts


class Contender(ABC):
    """Encodes and decodes one bucket at a time.

    Attributes:
        name: of its rows.
        error_feedback: whether what it leaves out of one round is added to the next.
    """

    name: str
    error_feedback: bool

    def layouts(self, numel: int) -> list[Layout]:
        """The buckets of ``numel`` parameters."""
        return slices(numel)

    @abstractmethod
    def start(self, layouts: list[Layout]) -> None:
        """Forget what was before, and allocate what is kept from round to round."""

    @abstractmethod
    def encode(self, vector: Float32Vector, part: int, number: int) -> Any:
        """The payload of bucket ``part`` in round ``number``."""

    @abstractmethod
    def add(self, payload: Any, part: int, out: Float32Vector) -> None:
        """``out += WEIGHT * decoded``, as a round does with each member's payload."""

    @abstractmethod
    def nbytes(self, payload: Any) -> int:
        """Bytes of a payload."""


class Own(Contender):
    """A codec of this package.

    Args:
        spec: as for ``sync_codec``.
        error_feedback: around a codec that loses something and has no feedback of its own, as by default.

    Raises:
        ConfigurationError: there is no such codec.
    """

    def __init__(self, spec: str, *, error_feedback: bool = True) -> None:
        codec: Codec = codec_from_spec(spec)
        if error_feedback and not (codec.lossless or codec.own_feedback):
            codec = ErrorFeedback(codec)
        self.name, self.error_feedback = codec.spec, codec.own_feedback
        self._codec = codec
        self._layouts: list[Layout] = []
        self._states: list[State] = []

    def layouts(self, numel: int) -> list[Layout]:
        return matrices(numel) if self._codec.whole_tensors else slices(numel)

    def start(self, layouts: list[Layout]) -> None:
        self._layouts = layouts
        self._states = [self._codec.init(layout) for layout in layouts]

    def encode(self, vector: Float32Vector, part: int, number: int) -> memoryview:
        return self._codec.encode(vector, self._layouts[part], self._states[part], Turn(number, part, member=0))

    def add(self, payload: memoryview, part: int, out: Float32Vector) -> None:
        self._codec.add(payload, self._layouts[part], WEIGHT, out)

    def nbytes(self, payload: memoryview) -> int:
        return payload.nbytes
