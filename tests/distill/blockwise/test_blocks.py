"""Blocks one after another are the model that they were cut from."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.blockwise.blocks import cut, parts_of
from paddlenlp_nebula.errors import NebulaError

from .models import batches, bert, llama, perceptron


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_blocks_of_a_model_do_what_the_model_does(make, number):
    model = make(4, 16)
    model.eval()
    for batch in batches(2):
        ids, mask = batch.tensors()
        expected = model(input_ids=ids, attention_mask=mask.astype("int64"), return_dict=True)["last_hidden_state"]
        state = ids
        for block in cut(parts_of(model), number):
            state = block(state, mask)
        np.testing.assert_array_equal(state.numpy()[batch.mask], expected.numpy()[batch.mask])


def test_a_head_is_left_out():
    from paddlenlp.transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert(2, 16).config)
    assert parts_of(model).embed is model.bert.embeddings


def test_layers_are_divided_evenly_and_are_the_models_own():
    parts = perceptron(7, 8)
    blocks = cut(parts, 3)
    assert [len(block.layers) for block in blocks] == [3, 2, 2]
    assert [layer for block in blocks for layer in block.layers] == parts.layers
    assert [block.first for block in blocks] == [True, False, False]


def test_a_block_takes_any_dtype_and_computes_in_its_own():
    block = cut(perceptron(2, 8), 2)[1]
    block.layers.to(dtype="float64")
    state = paddle.rand([1, 2, 8])
    found = block(state, paddle.ones([1, 2], dtype="bool"))
    assert found.dtype == paddle.float64
    np.testing.assert_array_equal(found.numpy(), block.layers[0](state.astype("float64")).numpy())


@pytest.mark.parametrize("number", [0, 4])
def test_more_blocks_than_layers_are_refused(number):
    with pytest.raises(NebulaError, match=f"a model of 3 layers must be cut into 1 to 3 blocks, got {number}"):
        cut(perceptron(3, 8), number)


def test_other_models_are_to_be_described():
    with pytest.raises(NebulaError, match="got Linear: describe it by Parts yourself"):
        parts_of(paddle.nn.Linear(2, 2))
