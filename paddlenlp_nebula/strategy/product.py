"""LoRA pairs in the flat vector of the selected parameters, merged by their products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.adapters.kernels import Float32Matrix
from paddlenlp_nebula.adapters.layout import Description, merge_vectors, split
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
    """Merges the members' LoRA pairs, whose ranks may differ; see `merge_vectors`.

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
        vectors = [self._trimmed(member, anchors[member] + change) for member, change in changes.items()]
        descriptions = [self._descriptions[member] for member in changes]
        shares = [float(weights[member]) for member in changes]
        merged: list[tuple[Description, Float32Vector]] = []
        for member, anchor in anchors.items():
            own = self._descriptions[member]
            vector = next((done for description, done in merged if description == own), None)
            if vector is None:
                try:
                    vector = merge_vectors(vectors, descriptions, shares, own)
                except ValueError as error:
                    raise NebulaError(f"the clusters' LoRA cannot be merged: {error}") from None
                merged.append((own, vector))
            for (wide_a, wide_b), factors in zip(self._pairs(member, anchor), split(vector, own), strict=True):
                wide_a[:], wide_b[:] = factors.a, factors.b

    def _trimmed(self, member: str, vector: Float32Vector) -> Float32Vector:
        """A member's factors at its own ranks, in the form of `layout`."""
        pieces = [piece.reshape(-1) for pair in self._pairs(member, vector) for piece in pair]
        return np.concatenate(pieces)

    def _pairs(self, member: str, vector: Float32Vector) -> Iterator[tuple[Float32Matrix, Float32Matrix]]:
        """The parts of a flat vector that are a member's A and B, layer by layer, as views."""
        for layer, shape in self._descriptions[member].items():
            place, rank = self._places[layer], shape["rank"]
            a = vector[place.a].reshape(shape["in"], place.width)
            b = vector[place.b].reshape(place.width, shape["out"])
            yield a[:, :rank], b[:rank]
