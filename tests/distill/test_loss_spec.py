"""Sums of losses as text, and weights in the course of training."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.distill.losses.spec import LOSSES, terms_from_spec
from paddlenlp_nebula.distill.losses.weights import SCHEDULES, Weight
from paddlenlp_nebula.errors import ConfigurationError

EVERYTHING = (
    "kl:tau=2*0.7 + ce*linear(0.3,1) + reverse_kl:tau=2*0.1+jsd:tau=2,beta=0.1*cosine(1,0)+"
    "hidden_mse:3=1/6=2 + hidden_cosine:6=2*.5 + relations:6=2,heads=8*warmup(1,0.1)"
)


def test_a_sum_of_everything() -> None:
    terms = terms_from_spec(EVERYTHING)
    assert {term.name for term in terms} == set(LOSSES)
    assert " + ".join(map(str, terms)) == (
        "kl:tau=2*0.7 + ce*linear(0.3,1) + reverse_kl:tau=2*0.1 + jsd:tau=2,beta=0.1*cosine(1,0) + "
        "hidden_mse:3=1/6=2 + hidden_cosine:6=2*0.5 + relations:6=2,heads=8*warmup(1,0.1)"
    )
    assert [str(term) for term in terms_from_spec(" + ".join(map(str, terms)))] == [str(term) for term in terms]
    assert terms[4].layers == ((3, 1), (6, 2))
    assert terms[6].options == {"heads": 8.0}
    assert {str(term.weight).partition("(")[0] for term in terms} >= set(SCHEDULES) - {"constant"}


def test_defaults() -> None:
    (term,) = terms_from_spec("jsd")
    assert (term.options, term.weight, term.label) == ({"tau": 1.0, "beta": 0.5}, Weight(), "jsd")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "a term must be one of kl"),
        ("KL", "did you mean 'kl'?"),
        ("kl:tau=0", "tau must be above 0"),
        ("kl:tau=1e3", r"it must be kl\[:tau=T\]"),
        ("kl:beta=0.5", r"it must be kl\[:tau=T\]"),
        ("jsd:beta=1", "beta must be above 0 and below 1"),
        ("ce:1", "it must be ce"),
        ("kl*-1", "a weight must be W or constant"),
        ("kl*linear(1)", r"a weight must be linear\(FIRST,LAST\)"),
        ("kl*warmup(1,2)", "SHARE at most 1"),
        ("kl*exp(1)", "a weight must be W or constant"),
        ("hidden_mse", "it must be hidden_mse:TEACHER=STUDENT"),
        ("hidden_mse:3", "it must be hidden_mse:TEACHER=STUDENT"),
        ("relations:6=2,heads=1.5", "heads must be a whole number"),
        ("kl + kl*2", "each term once, got 'kl' twice"),
        ("kl + jsd:tau=2", "one temperature .*, got 1 and 2"),
    ],
)
def test_what_is_no_sum_of_losses_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        terms_from_spec(spec)


def test_all_wrong_terms_are_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        terms_from_spec("kl:tau=x + what + ce")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.7", [0.7, 0.7, 0.7]),
        ("constant(0.7)", [0.7, 0.7, 0.7]),
        ("linear(1,0.2)", [1.0, 0.6, 0.2]),
        ("cosine(1,0)", [1.0, 0.5, 0.0]),
        ("warmup(2,0.5)", [0.0, 2.0, 2.0]),
        ("warmup(2,1)", [0.0, 1.0, 2.0]),
        ("warmup(2,0)", [2.0, 2.0, 2.0]),
    ],
)
def test_weights(text: str, values: list[float]) -> None:
    weight = Weight.parse(text)
    assert [weight.at(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(values)
    assert (weight.at(-1.0), weight.at(2.0)) == (weight.at(0.0), weight.at(1.0))
    assert Weight.parse(str(weight)) == weight
