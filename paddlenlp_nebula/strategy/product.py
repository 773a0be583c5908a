"""LoRA pairs in the flat vector of the selected parameters, merged by their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.adapters.layout import Description, Shape
from paddlenlp_nebula.adapters.merge import Factors, merge_products
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.selection import Selection

__all__ = ["ProductMerge"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's factors lie in the flat vector: A of shape (in, width), B of shape (width, out)."""

    a: slice
    b: slice
    width: int


class ProductMerge:
    """Merges the members' LoRA pairs, whose ranks may differ; see `merge_products`.

    In the selection every pair has the largest rank of all members; a smaller one is filled up with zeros.

    Args:
        selection: its parameters are named LAYER.lora_A and LAYER.lora_B, among others.
        descriptions: member -> its pairs.
    """

    def __init__(self, selection: Selection, descriptions: Mapping[str, Description]) -> None:
        self._descriptions = descriptions
        spans = {
            name: slice(selection.offsets[index], selection.offsets[index + 1])
            for index, name in enumerate(selection.names)
        }
        self._places = {
            layer: _Place(
                spans[f"{layer}.lora_A"],
                spans[f"{layer}.lora_B"],
                max(description[layer]["rank"] for description in descriptions.values()),
            )
            for layer in next(iter(descriptions.values()))
        }

    def begin(self, vectors: Mapping[str, Float32Vector]) -> dict[str, Float32Vector]:
        """The members' anchors at the start: the first one's parameters, but pairs of their own where ranks differ.

        Args:
            vectors: member -> its parameters as they were built, in the order of the members.
        """
        first, *_ = vectors
        anchors = {}
        for member, vector in vectors.items():
            anchors[member] = vectors[first].copy()
            for layer, place in self._places.items():
                if self._descriptions[member][layer] != self._descriptions[first][layer]:
                    anchors[member][place.a] = vector[place.a]
                    anchors[member][place.b] = vector[place.b]
        return anchors

    def clear(self, vector: Float32Vector) -> None:
        """Write zeros in place of the pairs."""
        for place in self._places.values():
            vector[place.a] = 0
            vector[place.b] = 0

    def merge(
        self,
        anchors: Mapping[str, Float32Vector],
        changes: Mapping[str, Float32Vector],
        weights: Mapping[str, np.float32],
    ) -> None:
        """Overwrite the pairs in all anchors by the merge of what the members have made of them.

        Args:
            anchors: member -> the flat vector that its change is counted from; other parameters in it stay as they are.
            changes: member -> its change, a flat vector.
            weights: member -> its share of the average.

        Raises:
            NebulaError: a factor is not finite, naming the layer.
        """
        for layer, place in self._places.items():
            factors = [
                self._factors(self._descriptions[member][layer], place, anchors[member], change)
                for member, change in changes.items()
            ]
            merged: dict[tuple[int, float], Factors] = {}
            for member, anchor in anchors.items():
                shape = self._descriptions[member][layer]
                rank, scaling = shape["rank"], shape["scaling"]
                if (rank, scaling) not in merged:
                    try:
                        a, b = merge_products(factors, [float(weights[name]) for name in changes], rank, scaling)
                    except ValueError as error:
                        raise NebulaError(f"LoRA layer {layer!r} cannot be merged: {error}") from None
                    merged[rank, scaling] = Factors(a, b, scaling)
                self._put(merged[rank, scaling], shape, place, anchor)

    @staticmethod
    def _factors(shape: Shape, place: _Place, anchor: Float32Vector, change: Float32Vector) -> Factors:
        a = (anchor[place.a] + change[place.a]).reshape(shape["in"], place.width)
        b = (anchor[place.b] + change[place.b]).reshape(place.width, shape["out"])
        return Factors(a[:, : shape["rank"]].copy(), b[: shape["rank"]].copy(), shape["scaling"])

    @staticmethod
    def _put(factors: Factors, shape: Shape, place: _Place, anchor: Float32Vector) -> None:
        anchor[place.a].reshape(shape["in"], place.width)[:, : shape["rank"]] = factors.a
        anchor[place.b].reshape(place.width, shape["out"])[: shape["rank"]] = factors.b
