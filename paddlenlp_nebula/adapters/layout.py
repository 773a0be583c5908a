"""How LoRA factors of unequal ranks travel: each cluster sends its own as they are and knows the others' shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias, TypedDict

import numpy as np

from paddlenlp_nebula.adapters.lora import LoraPair
from paddlenlp_nebula.adapters.merge import Factors, merge_products
from paddlenlp_nebula.codec.codec import Float32Vector, Layout

__all__ = ["Description", "Shape", "compare", "describe", "layout", "merge_vectors", "split"]

Shape = TypedDict("Shape", {"in": int, "out": int, "rank": int, "scaling": float})
"""Of one layer's LoRA."""

Description: TypeAlias = dict[str, Shape]
"""Layer name -> shape, in the model's order: JSON for the handshake, and the layout of what this cluster sends."""


def describe(pairs: Sequence[LoraPair]) -> Description:
    """What the other clusters must know of this cluster's pairs."""
    return {
        pair.name: {
            "in": int(pair.a.shape[0]),
            "out": int(pair.b.shape[1]),
            "rank": int(pair.a.shape[1]),
            "scaling": pair.scaling,
        }
        for pair in pairs
    }


def compare(descriptions: Mapping[str, Description]) -> list[str]:
    """One sentence for each cluster whose layers are not the first one's; ranks and scalings may differ.

    Args:
        descriptions: cluster -> its description, in the order of the clusters, as `describe` gave it or as JSON did.
    """
    problems = []
    (reference, expected), *others = descriptions.items()
    for cluster, description in others:
        for name in chain(expected, description):
            ours, theirs = expected.get(name), description.get(name)
            if ours is None or theirs is None:
                present, absent = (reference, cluster) if theirs is None else (cluster, reference)
                problem = f"cluster {present!r} has a LoRA in layer {name!r} but cluster {absent!r} has none there"
            elif (ours["in"], ours["out"]) != (theirs["in"], theirs["out"]):
                problem = (
                    f"layer {name!r} is {ours['in']} x {ours['out']} on cluster {reference!r} but "
                    f"{theirs['in']} x {theirs['out']} on cluster {cluster!r}"
                )
            else:
                continue
            problems.append(f"{problem}: build the same model with the same target_modules on all clusters")
            break
        else:
            if list(description) != list(expected):
                problems.append(
                    f"clusters {reference!r} and {cluster!r} have the same LoRA layers in another order: build the "
                    "same model on all clusters"
                )
    return problems


def layout(description: Description) -> Layout:
    """The flat vector a cluster sends: A, then B, of each layer in turn."""
    shapes = [((s["in"], s["rank"]), (s["rank"], s["out"])) for s in description.values()]
    return Layout(tuple(chain.from_iterable(shapes)))


def split(vector: Float32Vector, description: Description) -> list[Factors]:
    """A flat vector's factors, layer by layer, as views.

    Args:
        vector: shape (n,), in the form of `layout`.
        description: the sender's.

    Raises:
        ValueError: the vector's length is not what the description says.
    """
    shapes = layout(description).shapes
    ends = np.cumsum([0, *(rows * columns for rows, columns in shapes)])
    if vector.shape != (ends[-1],):
        raise ValueError(f"a vector of LoRA factors must have shape ({ends[-1]},), got {vector.shape}")
    parts = [vector[i:j].reshape(s) for i, j, s in zip(ends[:-1], ends[1:], shapes, strict=True)]
    scalings = [shape["scaling"] for shape in description.values()]
    return [Factors(a, b, s) for a, b, s in zip(parts[::2], parts[1::2], scalings, strict=True)]


def merge_vectors(
    vectors: Sequence[Float32Vector],
    descriptions: Sequence[Description],
    weights: Sequence[float],
    own: Description,
) -> Float32Vector:
    """What a cluster holds after a round: `merge_products` of each layer, as a flat vector.

    The result depends on the arguments alone: with another's description it is what that cluster will hold.

    Args:
        vectors: the members' factors, each in the form of `layout`, in the order of reduction.
        descriptions: the members', in the same order.
        weights: the members' shares.
        own: the description of the cluster whose factors are wanted.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite, naming the layer.
    """
    members = [split(vector, description) for vector, description in zip(vectors, descriptions, strict=True)]
    result = np.empty(layout(own).numel, dtype=np.float32)
    parts = split(result, own)
    for part, name, *factors in zip(parts, own, *members, strict=True):
        try:
            part.a[:], part.b[:] = merge_products(factors, weights, own[name]["rank"], own[name]["scaling"])
        except ValueError as error:
            raise ValueError(f"LoRA layer {name!r}: {error}") from None
    return result
