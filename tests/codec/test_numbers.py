"""How numbers in a spec may be written."""

from __future__ import annotations

import math

import pytest

from paddlenlp_nebula.codec.numbers import decimal, spelled, whole
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), ("999999999", 999999999)])
def test_whole(text: str, number: int) -> None:
    assert whole(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1\n", "1_0", "1.0", "٣", "²", "9" * 10, "9" * 5000])
def test_no_whole_number(text: str) -> None:
    assert whole(text) == -1


@pytest.mark.parametrize(
    ("text", "number"), [("0.1", 0.1), (".5", 0.5), ("1e-3", 1e-3), ("2e3", 2e3), ("inf", math.inf)]
)
def test_decimal(text: str, number: float) -> None:
    assert decimal(text) == number


@pytest.mark.parametrize(
    "text", ["", ".", "e3", "-0.1", "nan", " 0.1", "0.1\n", "0_0.1", "٣", "1e", "infinity", "0x1p3"]
)
def test_no_decimal(text: str) -> None:
    assert math.isnan(decimal(text))


@pytest.mark.parametrize("number", [1.0, 0.1, 1e-300, 1e300, 2.0**70, 5e-324, 1 / 3])
def test_what_is_spelled_is_read(number: float) -> None:
    assert decimal(spelled(number)) == number
    assert "+" not in spelled(number)


@pytest.mark.parametrize(
    "spec",
    [
        "topk:٣/٤",
        "topk:0/0",
        "topk:1/2 ",
        "lowrank:٣",
        "lowrank:" + "9" * 5000,
        "randomk:0_0.5",
        "randomk: 0.5",
        "randomk:0.1\n",
        "dgc:0.0_1",
        "dgc:0.1,warmup=٣",
        "dgc:0.1,warmup=" + "9" * 5000,
        "dgc:0.1,momentum=0.99999999999",
        "dgc:0.1,clip=1e-300",
        "int8:²",
    ],
)
def test_one_sentence_names_the_field_the_value_and_what_is_allowed(spec: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        codec_from_spec(spec)
    (sentence,) = caught.value.problems
    assert sentence.startswith(f"sync_codec must be {spec.partition(':')[0]}")
    assert f", got {spec!r}: " in sentence
    assert "string conversion" not in sentence


@pytest.mark.parametrize("spec", ["topk:+1/2", "dgc:0.1,warmup=+3", "+", "+int8", "int9+int8", "int8+"])
def test_a_plus_that_follows_no_random_k_is_what_is_named(spec: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        codec_from_spec(spec)
    assert list(caught.value.problems) == [f"sync_codec must have randomk:P[+CODEC] before a '+', got {spec!r}"]


def test_only_what_may_follow_a_plus_is_said_to_be_allowed() -> None:
    for spec in ("randomk:0.1+", "randomk:0.1+int8+int4", "randomk:0.1+dgc:0.1"):
        with pytest.raises(ConfigurationError) as caught:
            codec_from_spec(spec)
        allowed = caught.value.problems[0].partition(", got")[0]
        assert "sign" in allowed
        assert not any(family in allowed for family in ("lowrank", "randomk", "dgc"))


@pytest.mark.parametrize("spec", ["dgc:0.1,clip=1e300", "dgc:0.1,clip=1e20", "randomk:1e-300", "randomk:1e-05+int8"])
def test_a_codecs_own_spec_is_its_own(spec: str) -> None:
    assert codec_from_spec(codec_from_spec(spec).spec).spec == codec_from_spec(spec).spec
