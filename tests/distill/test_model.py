"""A PaddleNLP model as a teacher: what it offers, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.knowledge.knowledge import Extent
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec
from paddlenlp_nebula.distill.model import answer_by, offer_of
from paddlenlp_nebula.distill.service import Batch
from paddlenlp_nebula.errors import NebulaError

from .test_identity import WORDS, model, tokenizer

TOKENS = len(WORDS)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
IDS = np.array([[2, 5, 6, 0], [2, 7, 0, 0]])


def asked(spec: str, **inputs: Any) -> Batch:
    extent = Extent(rows=5, samples=2, vocabulary=TOKENS, width=8)
    found = {"input_ids": IDS, "attention_mask": MASK, **inputs}
    return Batch(found, knowledge_from_spec(spec), extent, "batch 3 of student 'birch'")


def test_it_offers_what_it_is(tmp_path: Path) -> None:
    offer = offer_of(model(), known := tokenizer(tmp_path / "a"), longest=8)
    assert (offer.tokens, offer.vocabulary, offer.width, offer.layers, offer.longest) == (TOKENS, TOKENS, 8, 1, 8)
    assert offer_of(model(1), known, longest=8).teacher != offer.teacher


def test_it_says_what_the_model_computes() -> None:
    teacher = model()
    told = answer_by(teacher)(asked(f"logits:top{TOKENS} + labels + hidden:0/1"))
    teacher.eval()
    outputs = teacher(
        input_ids=paddle.to_tensor(IDS),
        attention_mask=paddle.to_tensor(MASK),
        return_dict=True,
        output_hidden_states=True,
    )
    logits = outputs.logits.numpy()[MASK != 0][:, :TOKENS]  # the model has some more than the tokenizer
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(told["labels"], logits.argmax(axis=1))
    np.testing.assert_allclose(
        told["log_probabilities"], np.take_along_axis(logs, told["ids"], 1), rtol=1e-4, atol=1e-5
    )
    for layer in (0, 1):
        expected = outputs.hidden_states[layer].numpy()[MASK != 0]
        np.testing.assert_allclose(told[f"hidden.{layer}"], expected, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_say_is_named() -> None:
    with pytest.raises(NebulaError, match=r"needs the teacher's q.1, k.1, v.1, got logits"):
        answer_by(model())(asked("attention-relations:1"))
    with pytest.raises(NebulaError, match=r"logits of at least 14 tokens or classes, got 9"):
        answer_by(model(vocab_size=9))(asked("labels", input_ids=IDS * 0))


def test_not_a_number_names_batch_sample_and_position() -> None:
    teacher = model()
    with paddle.no_grad():
        teacher.bert.embeddings.word_embeddings.weight[7] = float("nan")
        with pytest.raises(NebulaError, match=r"the first at sample 0, position 0 of batch 3 of student 'birch'"):
            answer_by(teacher)(asked("labels"))
