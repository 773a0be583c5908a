"""Deep Gradient Compression against the paper's algorithm, written out in numpy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from paddlenlp_nebula.codec.codec import Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.dgc import DeepGradientCompression
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import TURN, decoded, encoded, named, normal

NUMEL = 3 * 4096 + 1000
LAYOUT = Layout(((NUMEL,),))


class Paper:
    """Momentum correction, local clipping and factor masking, the threshold taken per chunk."""

    def __init__(self, momentum: float, clip: float) -> None:
        self.momentum, self.clip = np.float32(momentum), clip
        self.u = np.zeros(NUMEL, dtype=np.float32)
        self.v = np.zeros(NUMEL, dtype=np.float32)

    def step(self, g: Float32Vector, kept: int) -> Float32Vector:
        norm = np.linalg.norm(g.astype(np.float64))
        if norm > self.clip:
            g = g * np.float32(self.clip / norm)
        self.u = self.momentum * self.u + g
        self.v = self.v + self.u
        mask = np.zeros(NUMEL, dtype=bool)
        for start in range(0, NUMEL, 4096):
            magnitudes = np.abs(self.v[start : start + 4096])
            count = -(-kept * len(magnitudes) // 4096)
            threshold = np.sort(magnitudes)[-count]
            mask[start : start + 4096] = magnitudes >= threshold
        sent = self.v * mask
        self.v = self.v * ~mask
        self.u = self.u * ~mask
        return sent


def gradients(count: int) -> list[Float32Vector]:
    common = normal(NUMEL, seed=99)
    return [common + normal(NUMEL, seed) for seed in range(count)]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("clip", [float("inf"), 100.0])
@pytest.mark.parametrize("ratio", [0.001, 0.05])
def test_it_is_the_papers_algorithm(ratio: float, momentum: float, clip: float) -> None:
    paper, codec = Paper(momentum, clip), DeepGradientCompression(ratio, momentum, clip)
    state = codec.init(LAYOUT)
    for number, gradient in enumerate(gradients(12), 1):
        payload = bytes(codec.encode(gradient, LAYOUT, state, Turn(number, 0, 0)))
        expected = paper.step(gradient, round(ratio * 4096))
        np.testing.assert_array_equal(decoded(codec, payload, LAYOUT), expected)
        np.testing.assert_array_equal(state["velocity"], paper.u)
        np.testing.assert_array_equal(state["residual"], paper.v)
    assert np.linalg.norm(gradient) > 100  # so that clip=100 acts


def test_without_momentum_nothing_is_lost() -> None:
    codec = DeepGradientCompression(0.01, momentum=0.0)
    state, sent, given = codec.init(LAYOUT), np.zeros(NUMEL), np.zeros(NUMEL)
    for number, gradient in enumerate(gradients(20), 1):
        given += gradient
        sent += decoded(codec, bytes(codec.encode(gradient, LAYOUT, state, Turn(number, 0, 0))), LAYOUT)
    np.testing.assert_allclose(sent + state["residual"], given, atol=1e-4)


def test_the_warm_up_falls_by_one_factor_per_round() -> None:
    """Section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 % of the elements."""
    codec, vector = DeepGradientCompression(0.001, warmup=4), normal(NUMEL)
    shares = []
    for number in range(1, 8):
        payload = encoded(codec, vector, LAYOUT, Turn(number, 0, 0))
        shares.append(np.count_nonzero(decoded(codec, payload, LAYOUT)[:4096]) / 4096)
        assert len(payload) <= codec.bound(LAYOUT)
    np.testing.assert_allclose(shares, [0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001, 0.001], rtol=0.03)
    assert len(payload) == pytest.approx(codec.estimate(LAYOUT), rel=0.05)
    after = DeepGradientCompression(0.001)
    assert (after.estimate(LAYOUT), after.bound(LAYOUT) < codec.bound(LAYOUT)) == (codec.estimate(LAYOUT), True)


@pytest.mark.parametrize("numel", [*range(1, 12), 1000, 4095, 4096, 4097, NUMEL])
@pytest.mark.parametrize("ratio", [0.00025, 0.001, 0.01, 0.2])
def test_the_bound_holds_in_every_round_of_a_warm_up(numel: int, ratio: float) -> None:
    layout, fewest = Layout.flat(numel), max(1, round(ratio * 4096))
    bounds = [TopK(kept, 4096, "fp32").bound(layout) for kept in range(fewest, 1025)]
    assert DeepGradientCompression(ratio, warmup=9).bound(layout) == 2 + max(bounds)


def test_what_was_sent_in_vain_can_be_taken_back() -> None:
    codec, vector = DeepGradientCompression(0.01), normal(NUMEL)
    state = codec.init(LAYOUT)
    payload = codec.encode(vector, LAYOUT, state, TURN)
    assert np.count_nonzero(state["residual"]) < NUMEL
    codec.take_back(payload, LAYOUT, state)
    np.testing.assert_array_equal(state["residual"], vector)


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    codec, inputs = named("dgc:0.01,warmup=3,clip=50"), gradients(6)

    def run(state: State, first: int, last: int) -> list[bytes]:
        return [bytes(codec.encode(inputs[i - 1], LAYOUT, state, Turn(i, 0, 0))) for i in range(first, last + 1)]

    state = codec.init(LAYOUT)
    run(state, 1, 2)
    saved = {name: array.tobytes() for name, array in state.items()}
    rest = run(state, 3, 6)
    resumed = named(codec.spec).init(LAYOUT)
    assert {name: array.dtype for name, array in resumed.items()} == dict.fromkeys(("velocity", "residual"), np.float32)
    for name, array in resumed.items():
        array[:] = np.frombuffer(saved[name], dtype=np.float32)
    assert run(resumed, 3, 6) == rest


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"\4", r"13288 elements as dgc:0\.001 must be 2 to \d+ bytes, got 1"),
        (bytes(1000), r"13288 elements as dgc:0\.001 must be 2 to \d+ bytes, got 1000"),
        (struct.pack("<H", 0) + bytes(60), r"13288 elements as dgc:0\.001 must be 4 to 4 of each 4096, got 0"),
        (struct.pack("<H", 5) + bytes(60), r"13288 elements as dgc:0\.001 must be 4 to 4 of each 4096, got 5"),
        (struct.pack("<H", 4), r"13288 elements as topk:4/4096,fp32 must be .*, got 0 bytes"),
    ],
)
def test_hostile_payloads(payload: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        decoded(DeepGradientCompression(0.001), payload, LAYOUT)


def test_specs() -> None:
    for spec in ("dgc:0.001", "dgc:0.001,momentum=0.5", "dgc:0.01,clip=2.5,warmup=4", "dgc:1,momentum=0,clip=0.1"):
        assert named(spec).spec == spec
    assert named("dgc:1e-3,warmup=4,momentum=0.9,clip=inf").spec == "dgc:0.001,warmup=4"
    assert named("dgc:0.001").own_feedback


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("dgc", "RATIO must be a number from 1/4096 to 1"),
        ("dgc:0.0001", "RATIO must be a number from 1/4096 to 1"),
        ("dgc:nan", "RATIO must be a number from 1/4096 to 1"),
        ("dgc:momentum=0.9", "RATIO must be a number from 1/4096 to 1"),
        ("dgc:0.01,momentum=1", "momentum must be a number from 0 and below 1"),
        ("dgc:0.01,momentum=x", "momentum must be a number from 0 and below 1"),
        ("dgc:0.01,clip=0", "clip must be a number more than 0"),
        ("dgc:0.01,clip", "clip must be a number more than 0"),
        ("dgc:0.01,warmup=-1", "warmup must be a whole number of rounds"),
        ("dgc:0.5,warmup=3", "a warm-up begins with 0.25 of the elements, so RATIO must be below that"),
        ("dgc:0.01,clip=1,clip=2", "after RATIO only momentum=, clip= and warmup= may follow, each once"),
        ("dgc:0.01,nesterov=1", "after RATIO only momentum=, clip= and warmup= may follow, each once"),
    ],
)
def test_other_options_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"sync_codec must be dgc:RATIO.*, got '{spec}': {sentence}"):
        named(spec)
