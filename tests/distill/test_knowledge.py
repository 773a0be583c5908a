"""What each kind of knowledge loses on its way, and what it takes."""

from __future__ import annotations

from math import comb, log2

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.codec.rice import Entries, Grid, pack
from paddlenlp_nebula.distill.extract import basis, most_probable, soft_labels, vectors
from paddlenlp_nebula.distill.knowledge.knowledge import Extent
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError, ProtocolError
from tests.distill.knowledge_table import EXTENT, arrays_of, log_probabilities, named, told

ROWS, VOCABULARY = 60, 30_522
LARGE = Extent(rows=ROWS, vocabulary=VOCABULARY)


def zipf(seed: int = 0) -> np.ndarray:
    """Logarithms of probabilities as of text: frequent tokens have low ids and are probable everywhere; the rest depends.

    A unigram distribution with exponent 1 (Zipf) after the 1,000 ids of special tokens and characters, as in BERT's
    vocabulary, and a context that changes each logit by a few units.
    """
    generator = np.random.default_rng(seed)
    logits = -np.log(np.arange(1, VOCABULARY + 1)) + 2.5 * generator.standard_normal((ROWS, VOCABULARY))
    logits = np.roll(logits, 1000, axis=1)
    logits[:, :1000] -= 10
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("make", [zipf, lambda: log_probabilities(LARGE, scale=1.0), lambda: log_probabilities(LARGE)])
def test_top_32_at_8_bit_takes_less_than_100_bytes(make) -> None:
    kind = named("logits:top32")
    size = kind.encode(told(make(), 32), LARGE).nbytes / ROWS
    assert size <= 83.5  # 4 of head, and no more than 79.5 whatever the ids are
    assert kind.bound(LARGE) / ROWS <= 83.51
    entropy = 4 + 32 + log2(comb(VOCABULARY, 32)) / 8
    assert size <= 1.01 * entropy


@pytest.mark.parametrize(("spec", "bits"), [("logits:top32", 8), ("logits:top32,fp16", 16)])
@pytest.mark.parametrize("scale", [0.0, 0.1, 4.0, 40.0])
def test_the_error_is_within_what_the_module_says(spec: str, bits: int, scale: float) -> None:
    arrays = told(log_probabilities(LARGE, scale=scale), 32)
    kind = named(spec)
    result = kind.decode(kind.encode(arrays, LARGE), LARGE)
    order = np.argsort(arrays["ids"], axis=1)
    values = np.take_along_axis(arrays["log_probabilities"], order, 1).astype(np.float64)
    np.testing.assert_array_equal(result["ids"], np.take_along_axis(arrays["ids"], order, 1))
    spread = values.max(axis=1) - values.min(axis=1)
    tail = np.abs(arrays["log_tail"] - values.max(axis=1))
    of_tail = tail * 2.0**-11 + 2.0**-25
    of_values = np.maximum(1.001 * spread / 255 / 2, 8e-6) if bits == 8 else spread * 2.0**-11 + 2.0**-25
    rounding = 1e-5 + 2e-7 * spread  # float32's own
    relative = [x - x.max(axis=1, keepdims=True) for x in (result["log_probabilities"], values)]
    assert (np.abs(relative[0] - relative[1]).max(axis=1) <= of_values + rounding).all()
    bound = 2 * np.maximum(of_tail, of_values) + rounding
    assert (np.abs(result["log_probabilities"] - values).max(axis=1) <= bound).all()
    assert (np.abs(result["log_tail"] - arrays["log_tail"]) <= bound).all()
    mass = np.exp(result["log_probabilities"].astype(np.float64)).sum(axis=1) + np.exp(result["log_tail"])
    np.testing.assert_allclose(mass, 1, rtol=1e-5)


def test_a_certain_teacher() -> None:
    """One token has all of the mass, and the others' logarithms go on for ever."""
    log_p = np.full((3, 50), -1e6)
    log_p[:, 7] = 0
    extent = Extent(rows=3, vocabulary=50)
    for spec in ("logits:top4", "logits:top4,fp16", "logits:top50"):
        kind = named(spec)
        result = kind.decode(kind.encode(told(log_p, kind.kept), extent), extent)
        np.testing.assert_array_equal(np.exp(result["log_probabilities"]).max(axis=1), 1)
        np.testing.assert_array_equal(np.exp(result["log_probabilities"]).sum(axis=1), 1)
        np.testing.assert_array_equal(result["log_tail"], -1e4)


def test_a_row_must_not_name_a_token_twice_or_one_that_is_none() -> None:
    arrays, kind = told(log_probabilities(EXTENT), 4), named("logits:top4")
    for wrong in (arrays["ids"][0, 1], -1, EXTENT.vocabulary):
        ids = arrays["ids"].copy()
        ids[0, 0] = wrong
        with pytest.raises(NebulaError, match="must differ and be below 1000"):
            kind.encode(arrays | {"ids": ids}, EXTENT)


def test_a_row_with_fewer_tokens_is_refused() -> None:
    kind, extent = named("logits:top4"), Extent(rows=2, vocabulary=50)
    entries = Entries(np.array([1, 2, 3, 4, 51, 52, 53]), np.array([4, 3], np.int32))
    stream = pack(entries, np.zeros(7, np.uint32), 8, Grid(100, 4, 50))
    with pytest.raises(ProtocolError, match="must be 4 tokens in each row, got 3 in one"):
        kind.decode(memoryview(bytes(8) + bytes(stream)), extent)


def test_a_sequence_longer_than_asked_for_is_refused() -> None:
    kind, extent = named("sequence"), Extent(rows=0, samples=2, vocabulary=50, longest=3)
    lengths = np.array([4, 2], "<u4").tobytes()  # together not too many
    with pytest.raises(ProtocolError, match="sequences of at most 3 tokens, got one of 4"):
        kind.decode(memoryview(lengths + bytes(12)), extent)


@pytest.mark.parametrize("spec", ["logits:top4", "logits:top4,fp16"])
def test_a_head_that_encode_never_writes_is_refused(spec: str) -> None:
    kind = named(spec)
    payload = bytes(kind.encode(arrays_of(kind, EXTENT), EXTENT))
    head = 2 if kind.form == "fp16" else 4
    for at in range(0, head * EXTENT.rows, 2):
        for word in (b"\x00\x7e", b"\x00\x7c", b"\x00\xfc"):  # NaN, infinities
            with pytest.raises(ProtocolError, match="logarithms relative to the largest probability"):
                kind.decode(memoryview(payload[:at] + word + payload[at + 2 :]), EXTENT)


def test_numbers_of_half_precision_out_of_range_are_refused() -> None:
    kind, extent = named("hidden:1,fp16"), Extent(rows=2, width=16)
    with pytest.raises(NebulaError, match="does not fit into hidden:1,fp16"):
        kind.encode({"hidden.1": np.full((2, 16), 1e5, np.float32)}, extent)
    payload = bytearray(kind.encode({"hidden.1": np.ones((2, 16), np.float32)}, extent))
    payload[7] = 0x7E  # NaN
    with pytest.raises(ProtocolError, match="finite numbers"):
        kind.decode(memoryview(bytes(payload)), extent)


@pytest.mark.parametrize("width", [16, 48, 64, 65, 384])
def test_hidden_states_at_8_bit(width: int) -> None:
    """Each row in blocks of its own, so that a large one does not drown the next; but for odd widths."""
    kind, extent = named("hidden:1"), Extent(rows=6, width=width)
    states = np.random.default_rng(0).standard_normal((6, width)).astype(np.float32)
    if width % 16 == 0:
        states *= 10.0 ** np.arange(6)[:, np.newaxis]
    result = kind.decode(kind.encode({"hidden.1": states}, extent), extent)["hidden.1"]
    largest = np.abs(states).max(axis=1, keepdims=True) if width % 16 == 0 else np.abs(states).max()
    assert (np.abs(result - states) <= largest * (0.5 / 127) * 1.001).all()
    assert kind.estimate(Extent(rows=6, width=384)) == 6 * (384 + 3 * 4)


def test_a_low_rank_keeps_lengths_in_the_mean() -> None:
    states = np.random.default_rng(0).standard_normal((1, 200, 96)).astype(np.float32)
    places = Places.of(np.ones((1, 200)))
    rows = vectors({"hidden.1": paddle.to_tensor(states)}, places, rank=24)["hidden.1"]
    assert rows.shape == (200, 24)
    np.testing.assert_allclose(rows, states[0] @ basis(96, 24), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(basis(96, 24).T @ basis(96, 24), 4 * np.eye(24), atol=1e-5)
    assert np.square(rows).sum() == pytest.approx(np.square(states).sum(), rel=0.05)
    kind, extent = named("hidden:1,lowrank:24"), Extent(rows=200, width=96)
    assert kind.encode({"hidden.1": rows}, extent).nbytes <= 200 * 24 * 1.5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_a_teachers_logits_become_soft_labels_on_the_device(dtype: str, tau: float) -> None:
    logits = paddle.to_tensor(4 * np.random.default_rng(0).standard_normal((2, 3, 40))).astype(dtype)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    rows = logits.astype("float64").numpy()[mask == 1] / tau
    expected = told(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)), 5)
    result = soft_labels(logits, Places.of(mask), 5, tau)
    for name, array in result.items():
        assert array.dtype == expected[name].dtype
    np.testing.assert_allclose(result["log_probabilities"], expected["log_probabilities"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["log_tail"], expected["log_tail"], rtol=1e-5, atol=1e-6)
    if dtype == "float32":  # no ties
        np.testing.assert_array_equal(result["ids"], expected["ids"])
    np.testing.assert_array_equal(most_probable(logits, Places.of(mask))["labels"], rows.argmax(axis=1))


def test_with_fewer_tokens_than_k_there_is_no_tail() -> None:
    result = soft_labels(paddle.randn([2, 3]), Places.of(np.ones(2)), 32, 1.0)
    assert result["ids"].shape == (2, 3)
    np.testing.assert_array_equal(result["log_tail"], -1e4)


def test_no_rows() -> None:
    places = Places.of(np.zeros((2, 3)))
    assert soft_labels(paddle.randn([2, 3, 9]), places, 4, 1.0)["ids"].shape == (0, 4)
    assert most_probable(paddle.randn([2, 3, 9]), places)["labels"].shape == (0,)
    assert vectors({"q.1": paddle.randn([2, 3, 9])}, places)["q.1"].shape == (0, 9)


def test_a_teacher_that_overflows_is_found_on_the_device() -> None:
    logits = np.zeros((2, 3, 9), np.float32)
    logits[1, 2, 4] = np.inf
    places = Places.of(np.ones((2, 3)), "batch 12")
    for tell in (lambda x: soft_labels(x, places, 4, 1.0), lambda x: most_probable(x, places)):
        with pytest.raises(NebulaError, match=r"logits must be finite .* at sample 1, position 2 of batch 12"):
            tell(paddle.to_tensor(logits))
    with pytest.raises(NebulaError, match=r"the teacher's hidden\.3 must be finite"):
        vectors({"hidden.3": paddle.to_tensor(logits)}, places)
