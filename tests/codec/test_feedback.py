"""Error feedback: nothing is lost, training goes on where it would stall, and a checkpoint holds it all."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_nebula.codec.cast import Bfloat16, Float32
from paddlenlp_nebula.codec.codec import Codec, Layout, State, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.quantize import Int2, Int4, Int8, Sign
from paddlenlp_nebula.codec.registry import codec_from_spec
from tests.codec.table import TURN, normal

LOSSY = [Bfloat16(), Int8(), Int4(), Int4(stochastic=True), Int2(), Sign()]
every = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.spec)
LAYOUT = Layout.flat(3000)


def rounds(codec: Codec, state: State, numbers: range) -> list[bytes]:
    return [bytes(codec.encode(normal(3000, number), LAYOUT, state, Turn(number, 0, 0))) for number in numbers]


@every
def test_what_went_in_has_come_out_or_is_kept(codec: Codec) -> None:
    feedback = ErrorFeedback(codec)
    state = feedback.init(LAYOUT)
    out = sum(feedback.decode(memoryview(p), LAYOUT).astype(np.float64) for p in rounds(feedback, state, range(1, 21)))
    went_in = sum(normal(3000, number).astype(np.float64) for number in range(1, 21))
    np.testing.assert_allclose(out + state["residual"], went_in, atol=1e-4)


@every
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_it_is_the_loop_of_the_paper(codec: Codec, decay: float) -> None:
    feedback, residual = ErrorFeedback(codec, decay), np.zeros(3000, dtype=np.float32)
    state = feedback.init(LAYOUT)
    for number in range(1, 4):
        vector, turn = normal(3000, number), Turn(number, 0, 0)
        corrected = np.float32(decay) * residual + vector
        expected = bytes(codec.encode(corrected, LAYOUT, {}, turn))
        residual = corrected - codec.decode(memoryview(expected), LAYOUT)
        assert bytes(feedback.encode(vector, LAYOUT, state, turn)) == expected
        np.testing.assert_array_equal(state["residual"], residual)
        np.testing.assert_array_equal(vector, normal(3000, number))


@every
def test_the_error_is_that_of_the_vector(codec: Codec) -> None:
    """Not that of the sum with the residual, which stays in the state."""
    feedback, error = ErrorFeedback(codec), np.empty(3000, dtype=np.float32)
    state = feedback.init(LAYOUT)
    for number in range(1, 4):
        vector = normal(3000, number)
        payload = feedback.encode(vector, LAYOUT, state, Turn(number, 0, 0), error)
        np.testing.assert_array_equal(error, vector - feedback.decode(payload, LAYOUT))


@every
def test_saved_and_loaded_it_sends_the_same_bytes(codec: Codec) -> None:
    feedback = ErrorFeedback(codec, 0.95)
    state = feedback.init(LAYOUT)
    rounds(feedback, state, range(1, 4))
    saved = {name: array.tobytes() for name, array in state.items()}
    went_on = rounds(feedback, state, range(4, 7))
    loaded = {name: np.frombuffer(array, np.float32).copy() for name, array in saved.items()}
    assert rounds(ErrorFeedback(codec, 0.95), loaded, range(4, 7)) == went_on
    np.testing.assert_array_equal(loaded["residual"].view(np.uint32), state["residual"].view(np.uint32))


@every
def test_a_round_that_came_to_nothing_is_sent_later(codec: Codec) -> None:
    feedback = ErrorFeedback(codec)
    state = feedback.init(LAYOUT)
    (payload,) = rounds(feedback, state, range(1, 2))
    feedback.take_back(memoryview(payload), LAYOUT, state)
    np.testing.assert_allclose(state["residual"], normal(3000, 1), atol=1e-5)


def stochastic_descent(codec: Codec) -> float:
    """How far from the optimum SGD on |x - 1|^2 / 2 ends, relative to where it began.

    A gradient's noise is 15 once in 16 times and -1 otherwise: right on average, but a codec that caps the
    rare large values is not (after Karimireddy et al. 2019, counterexample 1).
    """
    random, layout, x = np.random.default_rng(0), Layout.flat(512), np.zeros(512, dtype=np.float32)
    state, total = codec.init(layout), np.zeros(512)
    for number in range(2000):
        noise = np.where(random.random(512) < 1 / 16, 15, -1).astype(np.float32)
        payload = codec.encode(x - 1 + noise, layout, state, Turn(number, 0, 0))
        x = x - np.float32(0.02) * codec.decode(payload, layout)
        if number >= 1000:
            total += x - 1
    return float(np.abs(total.mean() / 1000))


@pytest.mark.parametrize("codec", [Int2(), Sign()], ids=lambda codec: codec.spec)
def test_training_goes_on_where_it_would_stall(codec: Codec) -> None:
    assert stochastic_descent(codec) > 0.4
    assert stochastic_descent(ErrorFeedback(codec)) < 0.02
    assert stochastic_descent(Float32()) < 0.02


@pytest.mark.parametrize("codec", [Float32(), ErrorFeedback(Sign()), codec_from_spec("dgc:0.05")])
def test_codecs_that_need_none_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="error feedback"):
        ErrorFeedback(codec)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_decay_is_between_0_and_1(decay: float) -> None:
    with pytest.raises(ValueError, match="the decay of error feedback must be between 0 and 1, got"):
        ErrorFeedback(Int4(), decay)


def test_it_is_what_it_wraps_to_others() -> None:
    feedback = ErrorFeedback(codec_from_spec("lowrank:2"))
    layout = Layout(((300, 40), (7,)))
    assert (feedback.spec, feedback.whole_tensors, feedback.own_feedback) == ("lowrank:2", True, True)
    assert feedback.estimate(layout) == feedback.codec.estimate(layout)
    assert feedback.bound(layout) == feedback.codec.bound(layout)
    inner = feedback.codec.init(layout)
    assert list(feedback.init(layout)) == ["residual", *inner]
    state = feedback.init(layout)
    feedback.encode(normal(layout.numel), layout, state, TURN)
    for name, array in inner.items():  # changed in place, as the contract says
        assert (state[name] != array).any()
    with pytest.raises(ValueError, match="set sync_error_feedback"):
        ErrorFeedback.parse([])
