"""Questions and answers come back as they were; anything else is refused in our own words."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.distill import messages
from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec, spec_of
from paddlenlp_nebula.distill.messages import Answer, Question
from paddlenlp_nebula.errors import NebulaError, ProtocolError
from tests.distill.knowledge_table import EXTENT, arrays_of

IDS = np.array([[101, 7592, 102], [101, 30521, 0]])
INPUTS = {
    "attention_mask": (IDS != 0).astype(np.int64),
    "input_ids": IDS,
    "labels": np.where(IDS == 101, -100, IDS),
    "lengths": np.array([3, 70_000]),
}
KINDS = knowledge_from_spec("logits:top4 + hidden:6 + labels")


def identity(inputs: dict = INPUTS, **values: object) -> Identity:
    fixed = {"position": 3, "tokenizer": "a" * 32, "teacher": "b" * 32, "knowledge": spec_of(KINDS)}
    return Identity(**{"batch": batch_fingerprint(inputs), **fixed, **values})


QUESTION = Question(identity(), INPUTS).pack()


def answer() -> Answer:
    arrays = {}
    for kind in KINDS:
        arrays |= arrays_of(kind, EXTENT)
    return Answer.to(identity(), KINDS, arrays, EXTENT)


@pytest.mark.parametrize(
    "inputs",
    [
        INPUTS,
        {},
        {"input_ids": np.zeros((0, 5), np.int64)},
        {"input_ids": np.arange(17)},
        {"input_ids": np.array([[-(1 << 31), (1 << 31) - 1]])},
        {"input_ids": np.array([1, 0, 1, 1, 1, 1, 1, 1, 1])},
    ],
    ids=lambda inputs: "+".join(f"{name}{list(array.shape)}" for name, array in inputs.items()),
)
def test_a_question_comes_back(inputs: dict) -> None:
    result = Question.parse(memoryview(Question(identity(inputs), inputs).pack()), "west")
    assert result.identity == identity(inputs)
    assert set(result.inputs) == set(inputs)
    for name, array in result.inputs.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, inputs[name])


def test_a_token_takes_two_bytes_and_a_mask_one_bit() -> None:
    ids = np.random.default_rng(0).integers(0, 30_522, (32, 128))
    inputs = {"attention_mask": np.ones_like(ids), "input_ids": ids, "labels": np.where(ids % 7, -100, ids)}
    size = len(Question(identity(inputs), inputs).pack())
    assert size <= (1 / 8 + 2 + 2) * ids.size + 200


def test_the_inputs_must_be_the_batch_that_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"question of west must be the batch [0-9a-f]{32}, got [0-9a-f]{32}"):
        Question.parse(memoryview(Question(identity({"input_ids": IDS + 1}), {"input_ids": IDS}).pack()), "west")


@pytest.mark.parametrize(
    "inputs",
    [
        {"Input": IDS},
        {"input_ids": IDS[np.newaxis]},
        {"input_ids": np.array(3)},
        {"input_ids": np.array([1 << 31])},
        {f"input_{number}": IDS for number in range(9)},
        {"input_ids": np.zeros((1 << 12, (1 << 10) + 1), np.int64)},
    ],
)
def test_a_question_that_does_not_fit_is_refused_by_who_asks(inputs: dict) -> None:
    with pytest.raises(NebulaError, match="question must have"):
        Question(identity({}), inputs).pack()


def test_an_answer_comes_back() -> None:
    result = Answer.parse(memoryview(answer().pack()), "east")
    arrays = result.arrays(identity(), KINDS, EXTENT, "east")
    assert list(arrays) == ["ids", "log_probabilities", "log_tail", "hidden.6", "labels"]
    np.testing.assert_array_equal(arrays["labels"], arrays_of(KINDS[2], EXTENT)["labels"])
    overhead = len(answer().pack()) - sum(part.nbytes for part in answer().parts)
    assert overhead <= 130


@pytest.mark.parametrize("name", ["batch", "tokenizer", "teacher"])
def test_an_answer_to_another_question_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"what east sent must be about {name} f+, got {name}"):
        answer().arrays(identity(**{name: "f" * 32}), KINDS, EXTENT, "east")
    with pytest.raises(ProtocolError, match="about position 4, got position 3"):
        answer().arrays(identity(position=4), KINDS, EXTENT, "east")


def test_an_answer_must_have_all_parts() -> None:
    with pytest.raises(ProtocolError, match=r"must have a part for each of logits:top4.*, got 2"):
        replace(answer(), parts=answer().parts[:2]).arrays(identity(), KINDS, EXTENT, "east")


@pytest.mark.parametrize(("kind", "data"), [(Question, QUESTION), (Answer, answer().pack())])
def test_what_is_cut_or_goes_on_is_refused(kind: type[Question | Answer], data: bytes) -> None:
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            kind.parse(memoryview(data[:cut]), "west")
    with pytest.raises(ProtocolError, match=r"must be 1 bytes shorter"):
        kind.parse(memoryview(data + b"\x00"), "west")


def hostile(data: bytes) -> st.SearchStrategy[bytes]:
    """Good bytes with some of them changed."""
    change = st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255))
    return st.lists(change, min_size=1, max_size=6).map(
        lambda changes: bytes(dict(changes).get(at, byte) for at, byte in enumerate(data))
    )


@settings(deadline=None)
@given(data=hostile(QUESTION) | st.binary(max_size=200).map(lambda rest: QUESTION[:70] + rest))
def test_hostile_questions(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        result = Question.parse(memoryview(data), "west")
        assert batch_fingerprint(result.inputs) == result.identity.batch or not result.inputs


@settings(deadline=None)
@given(data=hostile(answer().pack()) | st.binary(max_size=200))
def test_hostile_answers(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        Answer.parse(memoryview(data), "east").arrays(identity(), KINDS, EXTENT, "east")


def test_large_numbers_allocate_nothing() -> None:
    head = messages._QUESTION + identity().pack()
    shapes = [(1 << 22, 1), (1 << 11, 1 << 11), (1 << 22, 1 << 22), (1 << 32) - 1]
    tracemalloc.start()
    for shape in shapes:
        dimensions = shape if isinstance(shape, tuple) else (shape, shape)
        for form in (0, 1, 2, 3):
            data = head + b"\x01\x03ids" + bytes([form, 2]) + struct.pack("!2I", *dimensions) + b"\x01" * 100
            with pytest.raises(ProtocolError):
                Question.parse(memoryview(data), "west")
    for lengths in ([1 << 63], [1 << 20] * 8, [1 << 33] * 255):
        data = messages._ANSWER + identity().pack() + bytes([len(lengths)]) + struct.pack(f"!{len(lengths)}Q", *lengths)
        with pytest.raises(ProtocolError):
            Answer.parse(memoryview(data), "east")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_bits_do_not_unfold_to_more_elements_than_allowed() -> None:
    """A question of single bits is 64 times as long in memory."""
    shape = (1 << 11, (1 << 11) + 1)
    head = messages._QUESTION + identity().pack() + b"\x01\x03ids\x00\x02" + struct.pack("!2I", *shape)
    with pytest.raises(ProtocolError, match="must be at most 4194304 elements"):
        Question.parse(memoryview(head + bytes(shape[0] * shape[1] // 8)), "west")


def test_a_question_of_the_largest_size_takes_what_it_says() -> None:
    inputs = {"mask": np.ones((1 << 11, 1 << 11), np.int64)}
    data = Question(identity(inputs), inputs).pack()
    tracemalloc.start()
    Question.parse(memoryview(data), "west")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 10 * messages.MOST_ELEMENTS + 100_000
