"""Codecs on a device against their host twins: one format, the same bits decoded; here the device is the CPU."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.codec import device
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, Turn
from paddlenlp_nebula.codec.device.blocks import pack, unpack
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.registry import device_codec
from paddlenlp_nebula.codec.device.transfer import Tensor, state_to_device, state_to_host, to_device
from paddlenlp_nebula.codec.dgc import DeepGradientCompression
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.lowrank import LowRank
from paddlenlp_nebula.codec.quantize import Quantization
from paddlenlp_nebula.codec.randomk import RandomK
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import FED_BACK, SPECS, TURN, decoded, encoded, named, normal

CPU = paddle.CPUPlace()
WEIGHT = np.float32(0.3)
LAYOUTS = [
    Layout.flat(1),
    Layout.flat(2),
    Layout.flat(4095),
    Layout.flat(4097),
    Layout(((3, 5), (7,), (), (1, 1), (64, 33), (2, 3, 4))),
    Layout(((300, 40), (9, 1000))),
]
every_codec = pytest.mark.parametrize(
    "codec",
    [named(spec) for spec in SPECS] + [ErrorFeedback(named(spec), 0.95) for spec in FED_BACK],
    ids=[*SPECS, *(f"{spec} with feedback" for spec in FED_BACK)],
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout.shapes)))


def tensor(vector: Float32Vector) -> Tensor:
    return to_device(vector, CPU)


def encoded_there(twin: DeviceCodec, vector: Float32Vector, layout: Layout | None = None, turn: Turn = TURN) -> bytes:
    """The payload of a vector from a fresh state."""
    layout = layout or Layout.flat(len(vector))
    return bytes(twin.encode(tensor(vector), layout, twin.init(layout, CPU), turn))


def decoded_there(twin: DeviceCodec, payload: bytes, layout: Layout) -> Float32Vector:
    return twin.decode(memoryview(payload), layout, CPU).numpy()


def assert_same_bits(actual: Float32Vector, expected: Float32Vector) -> None:
    assert (actual.dtype, actual.shape) == (np.float32, expected.shape)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@every_codec
@every_layout
def test_the_host_decodes_what_the_device_encodes(codec: Codec, layout: Layout) -> None:
    twin, vector = device_codec(codec), normal(layout.numel)
    given = tensor(vector)
    payload = twin.encode(given, layout, twin.init(layout, CPU), TURN)
    assert (payload.format, payload.contiguous) == ("B", True)
    assert payload.nbytes <= codec.bound(layout)
    assert_same_bits(given.numpy(), vector)  # encoding changes nothing
    expected = decoded(codec, bytes(payload), layout)
    assert_same_bits(decoded_there(twin, bytes(payload), layout), expected)
    if codec.lossless:
        assert_same_bits(expected, vector)


@every_codec
@every_layout
def test_the_device_decodes_what_the_host_encodes(codec: Codec, layout: Layout) -> None:
    twin, payload = device_codec(codec), encoded(codec, normal(layout.numel), layout)
    assert_same_bits(decoded_there(twin, payload, layout), decoded(codec, payload, layout))


@every_codec
@every_layout
def test_adding_gives_the_same_bits(codec: Codec, layout: Layout) -> None:
    payload, expected = encoded(codec, normal(layout.numel), layout), normal(layout.numel, seed=1)
    out = tensor(expected)
    device_codec(codec).add(memoryview(payload), layout, WEIGHT, out)
    codec.add(memoryview(payload), layout, WEIGHT, expected)
    assert_same_bits(out.numpy(), expected)


@every_codec
@pytest.mark.parametrize("distribution", ["normal", "heavy"])
def test_it_loses_no_more_than_the_host(codec: Codec, distribution: str) -> None:
    layout = Layout(((130, 128), (64, 64), (100,)))
    vector = normal(layout.numel) ** (1 if distribution == "normal" else 3)

    def lost(payload: bytes) -> float:
        return float(np.linalg.norm(vector - decoded(codec, payload, layout)))

    assert lost(encoded_there(device_codec(codec), vector, layout)) <= 1.01 * lost(encoded(codec, vector, layout))


@every_codec
@every_layout
def test_zeros_stay_zeros(codec: Codec, layout: Layout) -> None:
    payload = encoded_there(device_codec(codec), np.zeros(layout.numel, np.float32), layout)
    np.testing.assert_array_equal(decoded(codec, payload, layout), 0)


@every_codec
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1.2e-38, 1e-30, 1e30, 3e38])
def test_magnitudes_at_the_ends_of_float32(codec: Codec, magnitude: float) -> None:
    vector = (np.clip(normal(5000), -1, 1) * magnitude).astype(np.float32)
    vector[0] = magnitude
    layout, twin = Layout(((50, 100),)), device_codec(codec)
    try:
        encoded(codec, vector, layout)
    except OverflowError as fault:
        with pytest.raises(OverflowError, match=re.escape(str(fault))):
            encoded_there(twin, vector, layout)
        return
    payload = encoded_there(twin, vector, layout)
    result = decoded(codec, payload, layout)
    assert_same_bits(decoded_there(twin, payload, layout), result)
    assert np.isfinite(result).all()
    assert np.linalg.norm((vector - result) / magnitude) <= 1.01 * np.linalg.norm(vector / magnitude)


@every_codec
def test_the_same_turn_gives_the_same_bytes_and_leaves_the_generators_alone(codec: Codec) -> None:
    twin, vector = device_codec(codec), normal(5000)
    paddle.seed(3)
    first = paddle.rand([1]).item(), encoded_there(twin, vector), paddle.rand([1]).item()
    paddle.seed(3)
    assert first == (paddle.rand([1]).item(), encoded_there(twin, vector), paddle.rand([1]).item())


@every_codec
@pytest.mark.parametrize("numel", [9, 5000])
@pytest.mark.parametrize("change", [-4, -1, 1, 1000])
def test_a_payload_of_another_size_does_not_decode(codec: Codec, numel: int, change: int) -> None:
    twin, layout, payload = device_codec(codec), Layout.flat(numel), encoded(codec, normal(numel))
    for bad in (payload[:change] if change < 0 else payload + bytes(change), b""):
        with pytest.raises(ProtocolError) as of_the_host:
            decoded(codec, bad, layout)
        with pytest.raises(ProtocolError) as of_the_device:
            decoded_there(twin, bad, layout)
        assert str(of_the_device.value) == str(of_the_host.value)
        out = tensor(np.ones(numel, np.float32))
        with pytest.raises(ProtocolError):
            twin.add(memoryview(bad), layout, WEIGHT, out)
        np.testing.assert_array_equal(out.numpy(), 1)


# States


LOSSY = [spec for spec in SPECS if not (named(spec).lossless or named(spec).own_feedback)]


@pytest.mark.parametrize("spec", LOSSY)
def test_what_went_in_comes_out_or_stays_in_the_residual(spec: str) -> None:
    layout = Layout(((90, 50), (700,)))
    twin = device_codec(ErrorFeedback(named(spec)))
    state = twin.init(layout, CPU)
    total = tensor(np.zeros(layout.numel, np.float32))
    given = np.zeros(layout.numel)
    for number in range(1, 6):
        vector = normal(layout.numel, number)
        before = state["residual"].numpy().copy()
        payload = twin.encode(tensor(vector), layout, state, Turn(number, 0, 0))
        assert_same_bits(state["residual"].numpy(), (before + vector) - decoded(twin.host, bytes(payload), layout))
        twin.add(payload, layout, np.float32(1), total)
        given += vector
    np.testing.assert_allclose(total.numpy() + state["residual"].numpy(), given, atol=2e-5)
    assert twin.unsent(state) is state["residual"]


@pytest.mark.parametrize("spec", LOSSY)
def test_a_state_moves_between_host_and_device(spec: str) -> None:
    """Rounds on the host, the device, the host, the device: the next begins where the last one ended."""
    layout = Layout(((90, 50), (700,)))
    codec = ErrorFeedback(named(spec))
    twin, state = device_codec(codec), codec.init(layout)
    described = [(name, array.dtype, array.shape) for name, array in state.items()]
    total, given = np.zeros(layout.numel, np.float32), np.zeros(layout.numel)
    for number in range(1, 5):
        vector, turn = normal(layout.numel, number), Turn(number, 0, 0)
        if number % 2:
            payload = codec.encode(vector, layout, state, turn)
        else:
            there = state_to_device(state, CPU)
            payload = twin.encode(tensor(vector), layout, there, turn)
            state = state_to_host(there)
        assert [(name, array.dtype, array.shape) for name, array in state.items()] == described
        codec.add(memoryview(bytes(payload)), layout, np.float32(1), total)
        given += vector
    np.testing.assert_allclose(total + state["residual"], given, atol=2e-5)


@pytest.mark.parametrize("spec", [*LOSSY, "dgc:0.01"])
def test_what_was_sent_is_taken_back(spec: str) -> None:
    layout = Layout(((90, 50), (700,)))
    codec = named(spec) if spec.startswith("dgc") else ErrorFeedback(named(spec))
    twin = device_codec(codec)
    there = twin.init(layout, CPU)
    payload = twin.encode(tensor(normal(layout.numel)), layout, there, TURN)
    here = {name: array.copy() for name, array in state_to_host(there).items()}
    twin.take_back(payload, layout, there)
    codec.take_back(payload, layout, here)
    assert list(there) == list(here)
    for name, array in here.items():
        assert_same_bits(there[name].numpy(), array)


@pytest.mark.parametrize("spec", ["dgc:0.01", "dgc:0.05,momentum=0.5,clip=1"])
def test_dgc_remembers_what_the_host_remembers(spec: str) -> None:
    layout, codec = Layout.flat(9000), named(spec)
    twin, here, there = device_codec(codec), codec.init(layout), device_codec(codec).init(layout, CPU)
    for number in range(1, 6):
        vector, turn = normal(layout.numel, number), Turn(number, 0, 0)
        codec.encode(vector, layout, here, turn)
        twin.encode(tensor(vector), layout, there, turn)
    for name, array in state_to_host(there).items():
        np.testing.assert_allclose(array, here[name], rtol=1e-5, atol=1e-7)


# What is copied to the host


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy from a tensor to the host."""
    sizes: list[int] = []
    read = paddle.Tensor.numpy

    def counted(self: Tensor, *args: object) -> np.ndarray:
        array = read(self, *args)
        sizes.append(array.nbytes)
        return array

    monkeypatch.setattr(paddle.Tensor, "numpy", counted)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        monkeypatch.setattr(paddle.Tensor, name, refused)
    return sizes


def refused(self: Tensor, *_: object) -> None:
    raise AssertionError("a copy to the host that nobody counted")


def most_copied(codec: Codec, layout: Layout, payload: memoryview) -> int:
    if isinstance(codec, ErrorFeedback):
        return most_copied(codec.codec, layout, payload)
    if isinstance(codec, RandomK):
        return most_copied(codec.inner, codec.chosen(layout), payload[8:]) + 4  # whether all that is sent is finite
    if isinstance(codec, DeepGradientCompression):
        return most_copied(codec.topk(codec.kept(TURN.round)), layout, payload[2:])
    if isinstance(codec, TopK):
        # Places of 2 bytes and codes of whole bytes, before they are put into a stream; and twice, for the full
        # chunks and for the last, whether all is finite.
        grid = codec.grid(layout)
        return grid.capacity * (2 + -(-codec.values.width // 8)) + grid.chunks * 8 + 2 * 4
    if isinstance(codec, LowRank):  # and the largest magnitudes, to see whether they fit
        return payload.nbytes + 4 * codec.rank
    return payload.nbytes


@every_codec
def test_only_the_payload_is_copied_to_the_host(codec: Codec, copied: list[int]) -> None:
    layout = Layout(((128, 64), (4100,)))
    twin, vector = device_codec(codec), tensor(normal(layout.numel))
    state = twin.init(layout, CPU)
    payload = twin.encode(vector, layout, state, TURN)
    assert 0 < sum(copied) <= most_copied(codec, layout, payload)
    copied.clear()
    twin.add(payload, layout, WEIGHT, vector)
    twin.take_back(payload, layout, state)
    assert copied == []


def test_the_copies_are_in_one_module() -> None:
    for path in Path(device.__file__).parent.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        reads = [node.attr for node in calls if node.attr in ("numpy", "item", "tolist", "cpu")]
        assert not reads or path.name == "transfer.py", path


# Families


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [1, 2, 7, 16, 33])
def test_codes_in_bytes(bits: int, numel: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (5, numel)).astype(np.float32)
    octets = pack(tensor(codes), bits)
    assert octets.shape == [5, -(-numel * bits // 8)]
    assert octets.max() < 256
    np.testing.assert_array_equal(unpack(octets, bits, numel).numpy(), codes)


@pytest.mark.parametrize("spec", ["int8", "int4:1024", "bf16", "fp16", "topk:5/64,4bit", "topk:1/1,fp32"])
def test_deterministic_codes_are_mostly_the_hosts(spec: str) -> None:
    ours, theirs = (
        np.frombuffer(encode(), np.uint8)
        for encode in (
            lambda: encoded_there(device_codec(named(spec)), normal(9000)),
            lambda: encoded(named(spec), normal(9000)),
        )
    )
    assert len(ours) == len(theirs)
    if "topk" not in spec or spec.endswith("fp32"):
        assert np.mean(ours == theirs) > 0.999


@pytest.mark.parametrize("value", [4.9e-27, -4.9e-27, 2.9e-8, 2**-25, 3e-8, 6.1e-5, -1e-7])
def test_fp16_is_not_misled_by_the_cast_of_paddle(value: float) -> None:
    """On CPU it makes 1.2e-7 of 4.9e-27."""
    vector = np.full(9, value, dtype=np.float32)
    result = decoded(named("fp16"), encoded_there(device_codec(named("fp16")), vector), Layout.flat(9))
    np.testing.assert_array_equal(result, vector.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_all_halves_decode_to_the_same_bits(spec: str) -> None:
    halves = np.arange(65536, dtype="<u2")
    exponent = 0x7C00 if spec == "fp16" else 0x7F80
    payload = halves[halves & exponent != exponent].tobytes()
    layout = Layout.flat(len(payload) // 2)
    assert_same_bits(decoded_there(device_codec(named(spec)), payload, layout), decoded(named(spec), payload, layout))


@pytest.mark.parametrize("spec", ["int8:64,stochastic", "int4:stochastic", "int2:128,stochastic"])
def test_stochastic_rounding_is_right_on_average(spec: str) -> None:
    codec, vector, layout = named(spec), normal(1024), Layout.flat(1024)
    assert isinstance(codec, Quantization)
    twin, turns = device_codec(codec), 200
    results = [decoded_there(twin, encoded_there(twin, vector, turn=Turn(t, 0, 0)), layout) for t in range(turns)]
    assert not np.array_equal(results[0], results[1])
    largest = np.abs(vector.reshape(-1, codec.block)).max(axis=1).repeat(codec.block)
    gap = largest / {8: 127, 4: 7, 2: 1.5}[codec.bits]  # between two levels
    error = (np.mean(results, axis=0) - vector) / gap
    # Rounding up or down has a variance of 1/4 gap^2 at most.
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(turns)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(turns * 1024)


def test_levels_of_chunks_of_very_different_magnitudes() -> None:
    vector = np.concatenate([normal(64, i) * np.float32(10.0**power) for i, power in enumerate(range(-42, 38, 4))])
    codec, layout = named("topk:5/64,4bit"), Layout.flat(len(vector))
    assert isinstance(codec, TopK)
    payload = encoded_there(device_codec(codec), vector.astype(np.float32), layout)
    positions, values = codec.entries(memoryview(payload), layout)
    normal_ones = np.abs(vector[positions]) > 1e-36
    np.testing.assert_allclose(values[normal_ones], vector[positions][normal_ones], rtol=0.2)
    assert len(positions) >= 5 * 18


def test_ties_and_zeros_among_the_largest() -> None:
    vector = np.zeros(300, dtype=np.float32)
    vector[[3, 70, 71]] = [1, -1, 1]
    for spec in ("topk:4/100,2bit", "topk:4/100,fp32", "topk:1/100"):
        codec = named(spec)
        assert isinstance(codec, TopK)
        positions, values = codec.entries(
            memoryview(encoded_there(device_codec(codec), vector)), Layout.flat(len(vector))
        )
        np.testing.assert_array_equal(values, vector[positions])
        assert (values != 0).all()
    constant = np.full(500, -2.5, dtype=np.float32)
    payload = encoded_there(device_codec(named("topk:4/100,1bit")), constant)
    assert np.count_nonzero(decoded(named("topk:4/100,1bit"), payload, Layout.flat(500))) == 20


@pytest.mark.parametrize("rank", [1, 3])
def test_lowrank_finds_what_the_host_finds(rank: int) -> None:
    layout, codec, vector = Layout(((60, 80),)), named(f"lowrank:{rank}"), normal(4800)
    twin = device_codec(codec)
    here, there = codec.init(layout), twin.init(layout, CPU)
    for number in range(1, 4):
        ours = twin.encode(tensor(vector), layout, there, Turn(number, 0, 0))
        theirs = codec.encode(vector, layout, here, Turn(number, 0, 0))
        np.testing.assert_allclose(codec.decode(ours, layout), codec.decode(theirs, layout), atol=1e-4)
        # The same directions, some of them pointing the other way.
        np.testing.assert_allclose(np.abs(there["q0"].numpy()), np.abs(here["q0"]), atol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_lowrank_of_a_matrix_of_lower_rank(scale: float) -> None:
    rng = np.random.default_rng(0)
    matrix = np.outer(rng.standard_normal(60), rng.standard_normal(80)).astype(np.float32).reshape(-1) * np.float32(
        scale
    )
    layout, codec = Layout(((60, 80),)), named("lowrank:4")
    twin = device_codec(codec)
    state = twin.init(layout, CPU)
    for number in range(1, 4):
        payload = twin.encode(tensor(matrix), layout, state, Turn(number, 0, 0))
        np.testing.assert_allclose(decoded(codec, bytes(payload), layout), matrix, atol=2e-6 * scale, rtol=1e-4)
        lengths = np.linalg.norm(state["q0"].numpy(), axis=0)
        np.testing.assert_allclose(lengths, 1, atol=1e-5)


@pytest.mark.parametrize("spec", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e-40, 3e38])
def test_a_scale_that_nobody_writes_is_refused(spec: str, scale: float) -> None:
    payload = np.float32(scale).tobytes() + encoded(named(spec), normal(100))[4:]
    with pytest.raises(ProtocolError, match=r"a scale of .* must be 0 or from"):
        decoded_there(device_codec(named(spec)), payload, Layout.flat(100))


def test_a_codec_without_a_twin_is_refused() -> None:
    class Other(Codec):
        grammar = spec = "other"
        parse = estimate = encode = decode = None  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="sync_codec='other' must have a device backend"):
        device_codec(Other())
