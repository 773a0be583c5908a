"""Fuzzing of what a teacher and a student read of each other."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given

from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.messages import Answer, Question
from paddlenlp_nebula.errors import ProtocolError
from tests.distill.knowledge_table import EXTENT, SPECS, arrays_of, named
from tests.fuzz.test_decoders import BUDGET_S, damaged, for_a_while, fuzz

pytestmark = pytest.mark.timeout(60 + 3 * BUDGET_S)


@pytest.mark.parametrize("spec", SPECS)
def test_knowledge(spec: str) -> None:
    kind = named(spec)
    arrays = arrays_of(kind, EXTENT)

    @fuzz
    @given(damaged(bytes(kind.encode(arrays, EXTENT))))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            for name, array in kind.decode(memoryview(data), EXTENT).items():
                assert array.shape == arrays[name].shape
                assert np.isfinite(array).all()

    for_a_while(check)


INPUTS = {"attention_mask": np.array([[1, 1, 0]]), "input_ids": np.array([[101, 102, 0]]), "labels": np.array([-100])}
IDENTITY = Identity(3, batch_fingerprint(INPUTS), "a" * 32, "b" * 32, "labels")


def test_questions() -> None:
    @fuzz
    @given(damaged(Question(IDENTITY, INPUTS).pack()))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            question = Question.parse(memoryview(data), "west")
            assert not question.inputs or batch_fingerprint(question.inputs) == question.identity.batch

    for_a_while(check)


def test_answers() -> None:
    kinds = [named("labels"), named("hidden:0")]
    good = Answer(IDENTITY, tuple(kind.encode(arrays_of(kind, EXTENT), EXTENT) for kind in kinds))

    @fuzz
    @given(damaged(good.pack()))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            assert sum(part.nbytes for part in Answer.parse(memoryview(data), "east").parts) <= len(data)

    for_a_while(check)
