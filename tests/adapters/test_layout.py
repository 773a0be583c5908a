"""What clusters of unequal rank send each other, and what becomes of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.adapters.layout import Description, compare, describe, layout, merge_vectors, split
from paddlenlp_nebula.adapters.lora import lora_pairs
from paddlenlp_nebula.adapters.merge import merge_products
from paddlenlp_nebula.codec.codec import Float32Vector

from .models import lora


def sent(model: Any) -> Float32Vector:
    pairs = lora_pairs(model)
    return np.concatenate([p.numpy().ravel() for pair in pairs for p in (pair.a, pair.b)])


def test_a_description_survives_json_and_gives_the_layout() -> None:
    model = lora(4)
    description = describe(lora_pairs(model))
    assert json.loads(json.dumps(description)) == description
    assert description == {
        "model.first": {"in": 6, "out": 5, "rank": 4, "scaling": 2.0},
        "model.second": {"in": 5, "out": 3, "rank": 4, "scaling": 2.0},
    }
    assert layout(description).shapes == ((6, 4), (4, 5), (5, 4), (4, 3))
    for factors, pair in zip(split(sent(model), description), lora_pairs(model), strict=True):
        np.testing.assert_array_equal(factors.a, pair.a.numpy())
        np.testing.assert_array_equal(factors.b, pair.b.numpy())
        assert factors.scaling == pair.scaling
    with pytest.raises(ValueError, match=r"must have shape \(76,\), got \(75,\)"):
        split(sent(model)[1:], description)


def test_ranks_and_scalings_may_differ() -> None:
    descriptions = {f"r{rank}": describe(lora_pairs(lora(rank))) for rank in (2, 4)}
    assert descriptions["r2"] != descriptions["r4"]
    assert compare(descriptions) == []


def changed(change: Any) -> Description:
    description = copy.deepcopy(describe(lora_pairs(lora(4))))
    change(description)
    return description


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["model.second"].update({"in": 7}), "layer 'model.second' is 5 x 3 on cluster 'west' but 7 x 3 on"),
        (lambda d: d["model.first"].update({"out": 9}), "layer 'model.first' is 6 x 5 on cluster 'west' but 6 x 9 on"),
        (
            lambda d: d.pop("model.first"),
            "cluster 'west' has a LoRA in layer 'model.first' but cluster 'east' has none",
        ),
        (lambda d: d.update(more=d["model.first"]), "cluster 'east' has a LoRA in layer 'more' but cluster 'west' has"),
        (lambda d: d.update({"model.first": d.pop("model.first")}), "the same LoRA layers in another order"),
    ],
)
def test_other_layers_are_named_in_one_sentence(change: Any, problem: str) -> None:
    same = describe(lora_pairs(lora(2)))
    (sentence,) = compare({"west": same, "north": same, "east": changed(change)})
    assert problem in sentence


def test_merging_vectors_merges_layer_by_layer() -> None:
    rng = np.random.default_rng(0)
    models = [lora(rank, seed) for seed, rank in enumerate((2, 4, 2))]
    for model in models:
        for pair in lora_pairs(model):
            pair.b.set_value(rng.standard_normal(pair.b.shape, dtype=np.float32))
    descriptions = [describe(lora_pairs(model)) for model in models]
    vectors = [sent(model) for model in models]
    weights = [0.5, 0.2, 0.3]
    results = [merge_vectors(vectors, descriptions, weights, own) for own in descriptions]
    assert results[0].tobytes() == results[2].tobytes()
    for own, result in zip(descriptions, results, strict=True):
        members = [split(vector, description) for vector, description in zip(vectors, descriptions, strict=True)]
        for part, name, *factors in zip(split(result, own), own, *members, strict=True):
            a, b = merge_products(factors, weights, own[name]["rank"], own[name]["scaling"])
            np.testing.assert_array_equal(part.a, a)
            np.testing.assert_array_equal(part.b, b)


def test_an_error_names_the_layer() -> None:
    description = describe(lora_pairs(lora()))
    vector = sent(lora())
    vector[-1] = np.nan
    with pytest.raises(ValueError, match=r"LoRA layer 'model.second': factors must be finite, .* from member 0"):
        merge_vectors([vector], [description], [1.0], description)
