"""Losses and knowledge that do not fit together are found before anything starts."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.distill.agreement import check_agreement
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec
from paddlenlp_nebula.distill.losses.spec import terms_from_spec
from paddlenlp_nebula.errors import ConfigurationError


@pytest.mark.parametrize(
    ("loss", "knowledge"),
    [
        ("kl:tau=2 + ce*0.3", "logits:top32,tau=2"),
        ("kl + hidden_mse:3=1/6=2", "hidden:3/6 + logits:top8,fp16"),
        ("relations:6=2", "attention-relations:6"),
        ("ce", "labels"),
        ("ce", "sequence"),
    ],
)
def test_what_fits(loss: str, knowledge: str) -> None:
    check_agreement(terms_from_spec(loss), knowledge_from_spec(knowledge))


@pytest.mark.parametrize(
    ("loss", "knowledge", "message"),
    [
        ("kl", "labels", "distill_loss='kl' needs ids, log_probabilities, log_tail in distill_knowledge, got 'labels'"),
        ("hidden_mse:3=1/9=2", "hidden:3", r"needs hidden\.9 in distill_knowledge, got 'hidden:3'"),
        ("relations:6=2", "attention-relations:5", r"needs k\.6, q\.6, v\.6 in"),
        ("kl:tau=2", "logits:top32", "must have one temperature, got 2 and 1"),
        ("ce", "logits:top32", "distill_knowledge='logits:top32' must be used by a loss"),
        ("hidden_mse:3=1", "hidden:3/6", r"got none for hidden\.6"),
    ],
)
def test_what_does_not(loss: str, knowledge: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_agreement(terms_from_spec(loss), knowledge_from_spec(knowledge))


def test_all_is_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_agreement(terms_from_spec("kl:tau=2 + hidden_mse:3=1"), knowledge_from_spec("logits:top32+hidden:6"))
    assert len(caught.value.problems) == 3
