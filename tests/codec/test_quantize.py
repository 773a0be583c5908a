"""Block-wise quantisation: against plain numpy, on average, at the ends of float32 and from hostile bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.codec import Float32Vector, Layout, Turn
from paddlenlp_nebula.codec.quantize import Int2, Int4, Int8, Quantization, Sign
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import TURN, decoded, encoded, normal, there_and_back

LARGEST = np.finfo(np.float32).max
NEAREST = [Int8(), Int8(64), Int4(), Int4(16), Int2(), Int2(32), Sign(), Sign(16)]
STOCHASTIC = [Int8(stochastic=True), Int4(32, stochastic=True), Int2(stochastic=True)]
by_spec = {"ids": lambda codec: codec.spec}

every = pytest.mark.parametrize("codec", NEAREST + STOCHASTIC, **by_spec)
nearest = pytest.mark.parametrize("codec", NEAREST, **by_spec)
stochastic = pytest.mark.parametrize("codec", STOCHASTIC, **by_spec)
finite = arrays.arrays(
    np.float32, st.integers(1, 100), elements=st.floats(-float(LARGEST), float(LARGEST), width=32, allow_nan=False)
)


def levels(codec: Quantization) -> npt.NDArray[np.float64]:
    if codec.bits >= 4:
        top = 2 ** (codec.bits - 1) - 1
        return np.arange(-top, top + 1, dtype=np.float64)
    return np.arange(1 - 2**codec.bits, 2**codec.bits, 2, dtype=np.float64)


def parts(codec: Quantization, payload: bytes, numel: int) -> tuple[Float32Vector, npt.NDArray[np.uint8]]:
    """Scales, and the codes in the order of the numbers: a second reading of the wire format."""
    blocks = -(-numel // codec.block)
    scales = np.frombuffer(payload[: 4 * blocks], "<f4")
    per, codes, at = 8 // codec.bits, [], 4 * blocks
    for block in range(blocks):
        size = min(codec.block, numel - block * codec.block)
        width = -(-size // per)
        octets = np.frombuffer(payload[at : at + width], np.uint8)
        at += width
        groups = [(octets >> (codec.bits * g)) & (2**codec.bits - 1) for g in range(per)]
        assert not np.concatenate(groups)[size:].any()  # what is left over is zero
        codes.append(np.concatenate(groups)[:size])
    assert at == len(payload)
    return scales, np.concatenate(codes)


def by_numpy(codec: Quantization, payload: bytes, numel: int) -> Float32Vector:
    scales, codes = parts(codec, payload, numel)
    step, offset = (1, 2 ** (codec.bits - 1)) if codec.bits >= 4 else (2, 2**codec.bits - 1)
    return np.repeat(scales, codec.block)[:numel] * (step * codes.astype(np.float32) - np.float32(offset))


@every
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 1023, 1024, 1031, 5000])
def test_decoding_follows_the_wire_format(codec: Quantization, numel: int) -> None:
    payload = encoded(codec, normal(numel))
    np.testing.assert_array_equal(decoded(codec, payload, Layout.flat(numel)), by_numpy(codec, payload, numel))


@nearest
@pytest.mark.parametrize("numel", [1, 17, 1023, 5000])
def test_the_nearest_level_is_sent(codec: Quantization, numel: int) -> None:
    vector = normal(numel)
    payload = encoded(codec, vector)
    scales, codes = parts(codec, payload, numel)
    for block, scale in enumerate(scales):
        x = vector[block * codec.block : (block + 1) * codec.block].astype(np.float64)
        mean, top = np.abs(x).mean(), levels(codec)[-1]
        wanted = mean * (0.625 if codec.bits == 2 else 1) if codec.by_mean else np.abs(x).max() / top
        assert scale == pytest.approx(wanted, rel=1e-6)
        distance = np.abs(x[:, None] / scale - levels(codec))
        sent = codes[block * codec.block : (block + 1) * codec.block].astype(int) - (1 if codec.bits >= 4 else 0)
        chosen = distance[np.arange(len(x)), sent]
        np.testing.assert_allclose(chosen, distance.min(axis=1), atol=2e-5)
        if not codec.by_mean:
            assert (chosen <= 0.5 + 2e-5).all()


@pytest.mark.parametrize(
    ("codec", "numbers", "scales", "codes"),
    [
        (Int8(16), [127, -127, 0, 2.5, 3.5], [1], "ff 01 80 82 84"),
        (Int4(16), [7, -7, *[0] * 6, 2, *[0] * 7, -0.5, 0.3], [1, 0.5 / 7], "af 81 88 88 88 88 88 88 c1"),
        (Int4(16), [7, 0, -1], [1], "7f 08"),
        (Int2(16), [2.5, -2, 1, -1, 0.5, -0.5, 0.5, 0], [0.625], "ab 94"),
        (Sign(16), [1, -1, 1, 1, -1, -1, -1, -1, 1], [1], "13 02"),
    ],
)
def test_bytes_on_the_wire(codec: Quantization, numbers: list[float], scales: list[float], codes: str) -> None:
    payload = encoded(codec, np.array(numbers, dtype=np.float32))
    assert payload == np.array(scales, "<f4").tobytes() + bytes.fromhex(codes)


@pytest.mark.parametrize(("spec", "most"), [("int8", 1.05), ("int4", 0.55), ("int2", 0.2625), ("sign", 0.13125)])
def test_bytes_per_number(spec: str, most: float) -> None:
    layout = Layout.flat(63 * 4096)
    assert codec_from_spec(spec).estimate(layout) / layout.numel <= most - 0.01 * most  # framing and TLS


@every
def test_the_bytes_depend_on_the_vector_and_the_turn_only(codec: Quantization) -> None:
    vector, layout = normal(5000), Layout.flat(5000)
    turns = [Turn(1, 0, 0), Turn(2, 0, 0), Turn(1, 1, 0), Turn(1, 0, 1)]
    payloads = {bytes(codec.encode(vector, layout, {}, turn)) for turn in turns}
    assert len(payloads) == (len(turns) if codec.stochastic else 1)
    assert encoded(codec, vector) == encoded(codec, np.array(vector, copy=True))
    backwards = vector[::-1].copy()[::-1]  # another place in memory
    assert encoded(codec, np.ascontiguousarray(backwards)) == encoded(codec, vector)


@stochastic
def test_stochastic_rounding_is_right_on_average(codec: Quantization) -> None:
    """Within 5 standard errors. A number between two levels d apart has a variance of at most d^2 / 4."""
    turns, numel = 2000, 512
    vector = normal(numel)
    layout = Layout.flat(numel)
    total = np.zeros(numel)
    for number in range(turns):
        total += codec.decode(codec.encode(vector, layout, {}, Turn(number, 0, 0)), layout)
    scales, _ = parts(codec, encoded(codec, vector), numel)
    distance = np.repeat(scales, codec.block)[:numel] * (1 if codec.bits >= 4 else 2)
    off = (total / turns - vector) / (distance / 2 / np.sqrt(turns))
    assert np.abs(off).max() < 5
    assert abs(off.sum() / np.sqrt(numel)) < 5  # nor is there a bias that is the same everywhere


@stochastic
def test_stochastic_rounding_goes_to_a_neighbour(codec: Quantization) -> None:
    vector = normal(5000)
    payload = encoded(codec, vector)
    distance = np.repeat(parts(codec, payload, 5000)[0], codec.block)[:5000] * (1 if codec.bits >= 4 else 2)
    error = np.abs(vector - decoded(codec, payload, Layout.flat(5000)))
    assert (error <= distance * (1 + 1e-4)).all()
    assert (error > distance / 2).mean() > 0.2  # nearest rounding has none


def test_numbers_that_are_levels_are_not_moved() -> None:
    vector = np.concatenate([np.arange(-127, 128), np.zeros(1)]).astype(np.float32)
    for number in range(50):
        payload = Int8(stochastic=True).encode(vector, Layout.flat(256), {}, Turn(number, 0, 0))
        np.testing.assert_array_equal(Int8().decode(payload, Layout.flat(256)), vector)


@stochastic
def test_random_numbers_of_neighbours_and_rounds_are_unrelated(codec: Quantization) -> None:
    """Correlations within 5 standard errors, between places, rounds and clusters."""
    layout = Layout.flat(1 << 16)
    vector = np.full(layout.numel, 0.5, np.float32)
    vector[:: codec.block] = levels(codec)[-1]  # the scale becomes 1; 0.5 lies between two levels
    here = np.arange(layout.numel) % codec.block != 0
    turns = [Turn(1, 0, 0), Turn(2, 0, 0), Turn(1, 0, 1)]
    ups = [codec.decode(codec.encode(vector, layout, {}, turn), layout)[here] > 0.5 for turn in turns]
    signs = [(up - up.mean()) / up.std() for up in ups]
    for number, sign in enumerate(signs):
        products = [sign[lag:] * sign[:-lag] for lag in (1, 2, 3, 16, 256)] + [sign * signs[number - 1]]
        assert all(abs(product.mean()) < 5 / np.sqrt(len(product)) for product in products)


@every
@settings(deadline=None)
@given(vector=finite)
def test_any_finite_numbers_decode_to_finite_ones(codec: Quantization, vector: Float32Vector) -> None:
    layout, error = Layout.flat(len(vector)), np.empty_like(vector)
    with np.errstate(over="raise", invalid="raise"):
        result = codec.decode(codec.encode(vector, layout, {}, TURN, error), layout)
    assert np.isfinite(result).all()
    assert np.isfinite(error).all()
    most = 1.5 if codec.bits == 2 else 1 + 1e-6  # a number just nearer to 3 scales than to one
    assert np.abs(result).max() <= most * np.float64(np.abs(vector).max())


@every
@pytest.mark.parametrize("value", [LARGEST, 3e38, 1e-45, 1e-40, 2.0**-126, 2.0**-120, 1e-30])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_ends_of_float32(codec: Quantization, value: float, sign: int) -> None:
    vector = np.full(100, sign * value, dtype=np.float32)
    result = there_and_back(codec, vector)
    assert np.isfinite(result).all()
    if value < 127 * 2.0**-126:
        assert (np.abs(result) <= 2 * value).all()
    elif codec.bits >= 4:
        np.testing.assert_allclose(result, vector, rtol=0.13)  # 7/8 of the largest number, at 4 bits
    assert (result * sign >= 0).all() or codec.stochastic


@every
def test_a_block_of_small_numbers_beside_one_of_large_ones(codec: Quantization) -> None:
    vector = np.concatenate([np.full(codec.block, 1e-20), np.full(codec.block, 1e20), np.zeros(3)]).astype(np.float32)
    result = there_and_back(codec, vector)
    tolerance = {8: 1e-6, 4: 1e-6, 2: 2.0, 1: 1e-5}[codec.bits]
    np.testing.assert_allclose(result[:-3], vector[:-3], rtol=tolerance)
    np.testing.assert_array_equal(result[-3:], 0)


@pytest.mark.parametrize("codec", [Int2(), Sign(), Int2(16), Sign(16)], **by_spec)
@settings(deadline=None)
@given(
    vector=arrays.arrays(np.float32, st.integers(1, 100), elements=st.floats(-1e6, 1e6, width=32)),
    outlier=st.sampled_from([0.0, 1e9]),
)
def test_what_is_lost_is_less_than_the_whole(codec: Quantization, vector: Float32Vector, outlier: float) -> None:
    """A contraction, as error feedback needs (Karimireddy et al. 2019, assumption A), whatever the distribution."""
    vector[0] += np.float32(outlier)
    error = np.empty_like(vector)
    codec.encode(vector, Layout.flat(len(vector)), {}, TURN, error)
    gain = 0.859 if codec.bits == 2 else 1.0
    saved = 0.0
    for start in range(0, len(vector), codec.block):
        x = vector[start : start + codec.block].astype(np.float64)
        saved += gain * len(x) * np.abs(x).mean() ** 2
    whole = np.sum(vector.astype(np.float64) ** 2)
    assert np.sum(error.astype(np.float64) ** 2) <= whole - saved + 1e-5 * whole + 1e-60


@every
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0 - 1e-30, 1e-40, 3e38])
def test_scales_that_nobody_writes_are_refused(codec: Quantization, scale: float) -> None:
    layout = Layout.flat(3 * codec.block)
    payload = bytearray(encoded(codec, normal(layout.numel)))
    payload[8:12] = np.float32(scale).tobytes()
    with pytest.raises(ProtocolError, match=r"a scale of .* must be 0 or from 1.18e-38 to .*, got .* in block 2"):
        decoded(codec, bytes(payload), layout)
    out = np.ones(layout.numel, dtype=np.float32)
    with pytest.raises(ProtocolError, match="in block 2"):
        codec.add(memoryview(payload), layout, np.float32(1), out)
    np.testing.assert_array_equal(out, 1)


@every
def test_any_codes_decode_to_finite_numbers(codec: Quantization) -> None:
    layout = Layout.flat(1000)
    blocks = -(-1000 // codec.block)
    cap = np.float32(LARGEST) / np.float32(max(2 ** (codec.bits - 1), 4))
    codes = np.random.default_rng(0).integers(0, 256, codec.estimate(layout) - 4 * blocks, np.uint8)
    assert np.isfinite(decoded(codec, np.full(blocks, cap).tobytes() + codes.tobytes(), layout)).all()


@every
def test_payloads_may_lie_anywhere(codec: Quantization) -> None:
    layout = Layout.flat(5000)
    payload = encoded(codec, normal(5000))
    shifted = memoryview(b"x" + payload)[1:]
    np.testing.assert_array_equal(codec.decode(shifted, layout), decoded(codec, payload, layout))
    out = np.zeros(5000, np.float32)
    codec.add(shifted, layout, np.float32(1), out)
    np.testing.assert_array_equal(out, decoded(codec, payload, layout))


@pytest.mark.parametrize(
    ("spec", "shortest"),
    [
        ("int8:256", "int8"),
        ("int8:stochastic", "int8:stochastic"),
        ("int8,stochastic", "int8:stochastic"),  # as the grammar int8[:BLOCK][,stochastic] has it
        ("int8:stochastic,64", "int8:64,stochastic"),
        ("int4:128,stochastic", "int4:stochastic"),
        ("int2:65536", "int2:65536"),
        ("sign:1024", "sign"),
        ("sign:16", "sign:16"),
    ],
)
def test_options_come_in_any_order(spec: str, shortest: str) -> None:
    assert codec_from_spec(spec).spec == shortest


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("int8:0", "BLOCK must be a power of two from 16 to 65536, got 0"),
        ("int8:8", "BLOCK must be a power of two from 16 to 65536, got 8"),
        ("int4:100", "got 100"),
        ("int2:131072", "got 131072"),
        ("int8:-64", "an option must be a block size or 'stochastic', got '-64'"),
        ("int8:64,128", "an option is given twice"),
        ("int8:stochastic,stochastic", "an option is given twice"),
        ("int8:", "an option must be a block size or 'stochastic', got ''"),
        ("int8:nearest", "got 'nearest'"),
        ("sign:stochastic", "signs are not rounded"),
    ],
)
def test_options_that_mean_nothing_are_refused(spec: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"sync_codec must be .*, got '{spec}': .*{problem}"):
        codec_from_spec(spec)
