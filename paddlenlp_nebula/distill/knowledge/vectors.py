"""Vectors of each position: hidden states, and the queries, keys and values that attention relations are made of.

Payload: vector after vector of numbers, name after name, in the form that the spec says. int8 is `codec.quantize`'s,
a scale for each block of up to 256 numbers that lies within one row: an error of at most half a step, 1/254 of the
block's largest magnitude.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.cast import Float16
from paddlenlp_nebula.codec.codec import Codec, Layout, Turn
from paddlenlp_nebula.codec.quantize import SMALLEST_BLOCK, Int8
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["AttentionRelations", "Hidden", "Vectors"]

_FORMS = ("fp16", "int8")
_MOST_LAYERS = 32
_ANY_TURN = Turn(round=0, part=0, member=0)  # these codecs draw no random numbers


class Vectors(Knowledge):
    """Arrays by name, float32, shape (rows, width) each.

    Attributes:
        form: ``fp16`` or ``int8``.
    """

    form: str

    @abstractmethod
    def width(self, extent: Extent) -> int:
        """Numbers of a row."""

    def estimate(self, extent: Extent) -> int:
        return len(self.names()) * self._codec(extent).estimate(self._layout(extent))

    def bound(self, extent: Extent) -> int:
        return self.estimate(extent)

    def memory(self, extent: Extent) -> int:
        return len(self.names()) * self._layout(extent).numel * 8 + 4096

    def encode(self, arrays: Mapping[str, npt.NDArray[Any]], extent: Extent) -> memoryview:
        codec, layout = self._codec(extent), self._layout(extent)
        parts = []
        for name in self.names():
            vectors = self.take(arrays, name, (extent.rows, self.width(extent)), np.float32)
            try:
                parts.append(codec.encode(vectors.ravel(), layout, {}, _ANY_TURN))
            except OverflowError as error:
                raise NebulaError(f"{name!r} does not fit into {self.spec}: {error}; use int8") from None
        return memoryview(b"".join(parts))

    def decode(self, payload: memoryview, extent: Extent) -> Arrays:
        codec, layout = self._codec(extent), self._layout(extent)
        if payload.nbytes != self.bound(extent):
            raise self.refusal(extent, f"{self.bound(extent)} bytes", f"{payload.nbytes}")
        size = payload.nbytes // len(self.names())
        arrays: Arrays = {}
        for number, name in enumerate(self.names()):
            try:
                vectors = codec.decode(payload[number * size : (number + 1) * size], layout)
            except ProtocolError as error:
                raise self.refusal(extent, "finite numbers", f"in {name!r}: {error}") from None
            if not np.isfinite(vectors).all():
                raise self.refusal(extent, "finite numbers", f"others in {name!r}")
            arrays[name] = vectors.reshape(extent.rows, self.width(extent))
        return arrays

    def _layout(self, extent: Extent) -> Layout:
        return Layout.flat(extent.rows * self.width(extent))

    def _codec(self, extent: Extent) -> Codec:
        if self.form == "fp16":
            return Float16()
        width = self.width(extent)
        divisor = width & -width  # the largest power of two in it: no block reaches into the next row
        return Int8(min(divisor, 256) if divisor >= SMALLEST_BLOCK else 64)


class Hidden(Vectors):
    """Hidden states of some layers, ``hidden.L`` for each: the output of layer L, 0 being the embeddings'.

    With ``lowrank`` a row has R coordinates instead of its width: those under the fixed random basis of
    `extract.basis`. The student is compared with them as they are, through a projection to R.

    Args:
        layers: L, ascending.
        form: ``fp16`` or ``int8``.
        rank: R, which is sent as int8; 0 for the whole width.
    """

    grammar = "hidden:L[/L...][,int8|fp16|lowrank:R]"

    def __init__(self, layers: Sequence[int], form: str = "int8", rank: int = 0) -> None:
        self.layers, self.form, self.rank = tuple(layers), form, rank
        option = f",lowrank:{rank}" if rank else "" if form == "int8" else f",{form}"
        self.spec = "hidden:" + "/".join(map(str, self.layers)) + option

    @classmethod
    def parse(cls, options: Sequence[str]) -> Hidden:
        layers = _layers(options[0] if options else "")
        if len(options) > 2:
            raise ValueError("after the layers only one option may follow")
        form = options[1] if len(options) == 2 else "int8"
        match = re.fullmatch(r"lowrank:(\d{1,5})", form)
        if match and int(match[1]) >= 1:
            return cls(layers, "int8", int(match[1]))
        if form not in _FORMS:
            raise ValueError(f"an option must be int8, fp16 or lowrank:R with R at least 1, got {form!r}")
        return cls(layers, form)

    def names(self) -> tuple[str, ...]:
        return tuple(f"hidden.{layer}" for layer in self.layers)

    def width(self, extent: Extent) -> int:
        return min(self.rank, extent.width) if self.rank else extent.width


class AttentionRelations(Vectors):
    """Queries, keys and values of one layer, heads side by side: ``q.L``, ``k.L``, ``v.L``.

    They travel instead of the relations that `losses.relation_kl` makes of them: at length T and A relation heads
    those are 3 A T numbers for each position, these 3 times the width.

    Args:
        layer: L, from 1.
        form: ``fp16`` or ``int8``.
    """

    grammar = "attention-relations:L[,int8|fp16]"

    def __init__(self, layer: int, form: str = "int8") -> None:
        self.layer, self.form = layer, form
        self.spec = f"attention-relations:{layer}" + ("" if form == "int8" else f",{form}")

    @classmethod
    def parse(cls, options: Sequence[str]) -> AttentionRelations:
        layers = _layers(options[0] if options else "")
        if len(layers) != 1 or layers[0] == 0:
            raise ValueError("L must be one layer, from 1")
        if len(options) > 2 or (len(options) == 2 and options[1] not in _FORMS):
            raise ValueError(f"the layer may be followed by one of {', '.join(_FORMS)}")
        return cls(layers[0], *options[1:])

    def names(self) -> tuple[str, ...]:
        return f"q.{self.layer}", f"k.{self.layer}", f"v.{self.layer}"

    def width(self, extent: Extent) -> int:
        return extent.width


def _layers(text: str) -> list[int]:
    layers = text.split("/")
    numbers = [int(layer) for layer in layers if re.fullmatch(r"\d{1,4}", layer)]
    if len(numbers) < len(layers) or numbers != sorted(set(numbers)) or len(numbers) > _MOST_LAYERS:
        raise ValueError(f"layers must be up to {_MOST_LAYERS} ascending whole numbers with '/' between them")
    return numbers
