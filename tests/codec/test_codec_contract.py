"""What every codec must do, over the whole table."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import CODECS, codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import FED_BACK, SPECS, TURN, decoded, encoded, named, normal, there_and_back

every_codec = pytest.mark.parametrize(
    "codec",
    [named(spec) for spec in SPECS] + [ErrorFeedback(named(spec), 0.95) for spec in FED_BACK],
    ids=[*SPECS, *(f"{spec} with feedback" for spec in FED_BACK)],
)
LAYOUTS = [
    Layout.flat(1),
    Layout.flat(2),
    Layout.flat(4095),
    Layout.flat(4097),
    Layout(((3, 5), (7,), (), (1, 1), (64, 33), (2, 3, 4))),
    Layout(((300, 40), (258_048,))),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout.shapes)))

vectors = arrays.arrays(
    np.float32, st.integers(1, 300), elements=st.floats(-60000, 60000, width=32, allow_subnormal=True)
)


def test_the_table_covers_every_family() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(CODECS)


@every_codec
@settings(deadline=None)  # the first example loads kernels
@given(vector=vectors)
def test_round_trip(codec: Codec, vector: Float32Vector) -> None:
    layout, before = Layout.flat(len(vector)), vector.copy()
    payload = codec.encode(vector, layout, codec.init(layout), TURN)
    assert (payload.format, payload.contiguous) == ("B", True)
    assert payload.nbytes <= codec.bound(layout)
    result = codec.decode(payload, layout)
    assert result.dtype == np.float32
    assert result.shape == vector.shape
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(vector, before)  # encoding changes nothing
    if codec.lossless:
        np.testing.assert_array_equal(result.view(np.uint32), vector.view(np.uint32))


@every_codec
@every_layout
def test_the_error_is_what_decoding_does_not_give_back(codec: Codec, layout: Layout) -> None:
    vector, error = normal(layout.numel), np.empty(layout.numel, dtype=np.float32)
    payload = bytes(codec.encode(vector, layout, codec.init(layout), TURN, error))
    np.testing.assert_array_equal(error, vector - decoded(codec, payload, layout))
    in_place = vector.copy()
    assert bytes(codec.encode(in_place, layout, codec.init(layout), TURN, in_place)) == payload
    np.testing.assert_array_equal(in_place, error)


@every_codec
@every_layout
def test_adding_is_decoding_and_adding(codec: Codec, layout: Layout) -> None:
    payload, weight = encoded(codec, normal(layout.numel), layout), np.float32(0.3)
    total = normal(layout.numel, seed=1)
    expected = total + weight * decoded(codec, payload, layout)
    codec.add(memoryview(payload), layout, weight, total)
    np.testing.assert_array_equal(total.view(np.uint32), expected.view(np.uint32))


@every_codec
@every_layout
def test_zeros_stay_zeros(codec: Codec, layout: Layout) -> None:
    np.testing.assert_array_equal(there_and_back(codec, np.zeros(layout.numel, np.float32), layout), 0)


@every_codec
@every_layout
def test_estimate_and_bound(codec: Codec, layout: Layout) -> None:
    sizes = [len(encoded(codec, normal(layout.numel, seed), layout)) for seed in range(3)]
    assert max(sizes) <= codec.bound(layout)
    if codec.bound(layout) == codec.estimate(layout):
        assert sizes == [codec.estimate(layout)] * 3
    elif layout.numel >= 4096:
        assert np.mean(sizes) == pytest.approx(codec.estimate(layout), rel=0.02)


@every_codec
@every_layout
def test_the_same_turn_and_state_give_the_same_bytes(codec: Codec, layout: Layout) -> None:
    runs = []
    for _ in range(2):
        state = codec.init(layout)
        runs.append([])
        for number in range(1, 4):
            turn = Turn(round=number, part=2, member=1)
            runs[-1].append(bytes(codec.encode(normal(layout.numel, number), layout, state, turn)))
            assert list(state) == list(codec.init(layout))  # the same arrays, to be saved and loaded
            saved = {name: array.copy() for name, array in state.items()}
            assert all(array.dtype != object for array in saved.values())
            state = saved
    assert runs[0] == runs[1]


@every_codec
@pytest.mark.parametrize("numel", [9, 5000])
@pytest.mark.parametrize("change", [-4, -2, -1, 1, 2, 1000])
def test_a_payload_of_another_size_does_not_decode(codec: Codec, numel: int, change: int) -> None:
    payload, layout = encoded(codec, normal(numel)), Layout.flat(numel)
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    for bad in (wrong, b""):
        with pytest.raises(ProtocolError, match=f"{numel} elements as .*, got"):
            decoded(codec, bad, layout)
        out = np.ones(numel, dtype=np.float32)
        with pytest.raises(ProtocolError):
            codec.add(memoryview(bad), layout, np.float32(1), out)
        np.testing.assert_array_equal(out, 1)


@every_codec
@settings(deadline=None)  # the first example loads kernels
@given(data=st.data(), numel=st.integers(1, 9000))
def test_hostile_bytes_are_refused_or_decode_to_numbers(codec: Codec, data: st.DataObject, numel: int) -> None:
    """Whatever a payload says, nothing outside of it is read and nothing outside of the vector is written."""
    layout = Layout.flat(numel)
    payload = bytearray(encoded(codec, normal(numel)))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    with contextlib.suppress(ProtocolError):
        assert decoded(codec, bytes(payload), layout).shape == (numel,)


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_found_by_its_spec(spec: str) -> None:
    codec = named(spec)
    assert type(codec_from_spec(codec.spec)) is type(codec)
    assert codec_from_spec(codec.spec).spec == codec.spec
    assert codec.grammar.startswith(codec.spec.partition(":")[0])


@pytest.mark.parametrize("spec", ["", "fp64", "FP32", "fp32 ", "__import__('os')"])
def test_other_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sync_codec must be one of fp32, bf16, fp16.*, got"):
        codec_from_spec(spec)


@pytest.mark.parametrize("spec", ["fp32:", "bf16:2bit", "bf16,2bit", "fp16:x,y"])
def test_casts_take_no_options(spec: str) -> None:
    family = spec[:4]
    with pytest.raises(
        ConfigurationError, match=f"sync_codec must be {family}, got '{spec}': {family} takes no options"
    ):
        codec_from_spec(spec)


@every_codec
def test_what_sends_all_leaves_no_element_out(codec: Codec) -> None:
    layout = Layout(((60, 70),))
    vector = np.where(np.arange(layout.numel) % 3, 1, -1).astype(np.float32)
    vector[::7] *= np.float32(0.9)  # one rank does not do for it, nor do equal magnitudes
    result = there_and_back(codec, vector, layout)
    assert codec.sends_all is bool((np.sign(result) == np.sign(vector)).all()) or codec.spec.startswith("lowrank")
