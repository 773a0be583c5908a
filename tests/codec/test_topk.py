"""Top-k: the elements that numpy would choose, in the bytes that were promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.codec import Float32Vector, Layout
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import TURN, decoded, encoded, normal, there_and_back

MILLION = 1 << 20


def largest(vector: Float32Vector, kept: int, chunk: int) -> Float32Vector:
    """The vector with zeros for all but the largest of each chunk, of equal ones the first."""
    result = np.zeros_like(vector)
    for start in range(0, len(vector), chunk):
        part = vector[start : start + chunk]
        chosen = np.argsort(-np.abs(part), kind="stable")[: -(-kept * len(part) // chunk)]
        result[start + chosen] = part[chosen] + np.float32(0)  # without the sign of zeros, which are not sent
    return result


def data(kind: str, numel: int) -> Float32Vector:
    generator, vector = np.random.default_rng(1), normal(numel)
    return {
        "normal": vector,
        "laplace": generator.laplace(size=numel),
        "student": generator.standard_t(3, numel),
        "cauchy": np.clip(generator.standard_cauchy(numel), -6e4, 6e4),
        "rows": vector * np.exp(2 * generator.standard_normal(-(-numel // 512)).repeat(512)[:numel]),
        "few rows": vector * (generator.random(-(-numel // 256)) < 0.02).repeat(256)[:numel],
        "ends": np.where(np.arange(numel) % 4096 >= 4032, 1 + np.abs(vector), 1e-3 * vector),
        "starts": np.where(np.arange(numel) % 4096 < 64, 1 + np.abs(vector), 1e-3 * vector),
        "equal": np.ones(numel),
        "few values": generator.integers(-2, 3, numel),
        "ascending": np.arange(numel),
        "descending": -np.arange(numel)[::-1],
        "uneven chunks": vector * 2.0 ** generator.integers(-90, 90, numel // 4096 + 1).repeat(4096)[:numel],
        "denormal": generator.integers(-50, 50, numel) * 2.0**-149,
        "huge": np.where(vector > 0, 3.4e38, -3.3e38) * generator.random(numel),
    }[kind].astype(np.float32)


KINDS = ["normal", "student", "cauchy", "rows", "few rows", "equal", "few values", "ascending", "descending"]
KINDS += ["denormal", "huge", "uneven chunks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("numel", "kept", "chunk"),
    [
        (90_000, 64, 4096),
        (4096, 4096, 4096),
        (9000, 1, 4096),
        (300, 1, 1),
        (1000, 7, 7),
        (1000, 3, 10),
        (70_000, 1000, 65536),
        (65, 64, 4096),
        (4000, 3000, 4096),
        (1, 5, 64),
    ],
)
def test_the_largest_are_chosen(kind: str, numel: int, kept: int, chunk: int) -> None:
    vector = data(kind, numel)
    result = there_and_back(TopK(kept, chunk, "fp32"), vector)
    np.testing.assert_array_equal(result.view(np.uint32), largest(vector, kept, chunk).view(np.uint32))


@settings(deadline=None)
@given(
    vector=arrays.arrays(
        np.float32, st.integers(1, 200), elements=st.floats(-(2.0**127), 2.0**127, width=32) | st.integers(-2, 2)
    ),
    chunk=st.integers(1, 70),
    share=st.floats(0, 1),
)
def test_the_largest_of_any_numbers_are_chosen(vector: Float32Vector, chunk: int, share: float) -> None:
    kept = max(round(share * chunk), 1)
    np.testing.assert_array_equal(there_and_back(TopK(kept, chunk, "fp32"), vector), largest(vector, kept, chunk))


@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "cauchy", "rows", "few rows", "ends", "starts"])
def test_bytes_per_parameter_at_two_bits(kind: str) -> None:
    codec = TopK(64, 4096, "2bit")
    vector, layout = data(kind, MILLION), Layout.flat(MILLION)
    assert codec.bound(layout) <= 0.020 * MILLION  # wherever they lie
    size = len(encoded(codec, vector))
    assert size <= codec.bound(layout)
    if kind in ("normal", "laplace", "student", "cauchy"):
        assert size == pytest.approx(0.01907 * MILLION, rel=0.002)
        assert size == pytest.approx(codec.estimate(layout), rel=0.002)
    elif kind != "ends":  # the worst case
        assert size < 0.01907 * MILLION


@pytest.mark.parametrize(
    ("values", "bytes_per_parameter"), [("fp32", 0.0772), ("fp16", 0.0459), ("4bit", 0.0230), ("1bit", 0.0171)]
)
def test_bytes_per_parameter_of_other_values(values: str, bytes_per_parameter: float) -> None:
    size = len(encoded(TopK(64, 4096, values), data("normal", MILLION)))
    assert size == pytest.approx(bytes_per_parameter * MILLION, rel=0.003)


def test_zeros_take_nothing() -> None:
    """An embedding that a round hardly used: 2 bytes of scale and 7 bits of stream for each untouched chunk."""
    vector = np.zeros(100 * 4096, dtype=np.float32)
    assert len(encoded(TopK(64, 4096, "2bit"), vector)) == 100 * 2 + -(-100 * 7 // 8)
    vector[[5, 70_000]] = 1.0, -3.0
    codec = TopK(64, 4096, "2bit")
    assert len(encoded(codec, vector)) <= 100 * 2 + -(-100 * 7 // 8) + 4
    np.testing.assert_array_equal(there_and_back(codec, vector), vector)


@pytest.mark.parametrize("values", ["fp32", "4bit", "2bit", "1bit"])
@pytest.mark.parametrize("exponent", [-100, -30, 30, 100])
def test_the_magnitude_of_a_bucket_does_not_matter(values: str, exponent: int) -> None:
    vector, codec = data("student", 9000), TopK(64, 4096, values)
    factor = np.float32(2.0**exponent)
    np.testing.assert_array_equal(there_and_back(codec, vector * factor), factor * there_and_back(codec, vector))


def test_feedback_sends_all_of_a_vector_in_the_end() -> None:
    """What is not sent now is sent later: the sum of the decoded approaches the sum of the vectors."""
    codec, vector = TopK(64, 4096, "2bit"), data("normal", 8192)
    layout, error, total = Layout.flat(8192), np.zeros(8192, np.float32), np.zeros(8192, np.float32)
    for _ in range(1000):
        error += vector
        codec.add(codec.encode(error, layout, {}, TURN, error), layout, np.float32(1), total)
    assert np.linalg.norm(total / 1000 - vector) < 0.1 * np.linalg.norm(vector)


def test_adding_touches_only_what_was_sent() -> None:
    codec, vector = TopK(2, 8, "fp32"), np.array([0, 5, -4, 1, 0, 0, 0, 0], dtype=np.float32)
    total = np.array([-0.0, 1, np.nan, np.inf, -0.0, 1, 2, 3], dtype=np.float32)
    expected = np.array([-0.0, 3.5, np.nan, np.inf, -0.0, 1, 2, 3], dtype=np.float32)
    codec.add(memoryview(encoded(codec, vector)), Layout.flat(8), np.float32(0.5), total)
    np.testing.assert_array_equal(total.view(np.uint32), expected.view(np.uint32))


def test_a_received_payload_may_lie_anywhere() -> None:
    """Neither aligned nor writable."""
    codec, vector = TopK(64, 4096, "4bit"), data("normal", 9001)
    payload = encoded(codec, vector)
    expected = decoded(codec, payload, Layout.flat(9001))
    for offset in range(1, 9):
        shifted = memoryview(bytes(offset) + payload)[offset:]
        np.testing.assert_array_equal(codec.decode(shifted, Layout.flat(9001)), expected)
    vector.flags.writeable = False
    assert encoded(codec, vector) == payload


def test_the_wire() -> None:
    """Two scales, little-endian, then the stream; see `rice` and `levels`."""
    vector = np.array([0, 0, 1.0, 0, -1.5, 0, 0, 0, 2.0], dtype=np.float32)
    # 1.0 and 4 steps of 1/8: bits 0x3F800000 >> 19 = 0x7F0, number 3; 2.0: 0x800, number 0.
    scales = bytes.fromhex("037f0080")
    # p = 1; full chunk: "0"; gap 2: "01" "0", code 0 "00"; gap 1: "1" "1", code 3 "11"; one more, gap 0: "0" "1" "0" "00"
    bits = "0" + "01" + "0" + "00" + "1" + "1" + "11" + "0" + "1" + "0" + "00" + "0"
    assert encoded(TopK(2, 8, "2bit"), vector) == scales + int(bits[::-1], 2).to_bytes(2, "little")


def test_an_empty_bucket() -> None:
    codec, nothing = TopK(64, 4096, "2bit"), np.empty(0, dtype=np.float32)
    assert encoded(codec, nothing) == b""
    assert len(there_and_back(codec, nothing)) == 0


def test_what_fp16_does_not_hold_is_refused_if_it_would_be_sent() -> None:
    vector = np.array([1, 65520, 7e4, 0], dtype=np.float32)
    with pytest.raises(OverflowError, match="its largest magnitude 70000 exceeds fp16's 65504"):
        encoded(TopK(1, 4, "fp16"), vector)
    assert there_and_back(TopK(1, 4, "2bit"), vector)[2] == pytest.approx(7e4, rel=0.04)


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        ("00", "got 1 bytes with fewer than their 2 bytes of scales"),
        ("0000", "got 2 bytes with a stream of codes that ends early or points outside"),
        ("00000100", "got 4 bytes with 1 bytes after its last code"),
        ("f07f02", "a stream of codes that ends early"),
        ("f0ff01", "got 3 bytes with a level that is not finite"),
        ("100001", "got 3 bytes with a level that is not finite|below the normal"),
        ("080001", "got 3 bytes with a scale below the normal float32"),
    ],
)
def test_what_is_not_a_payload_is_refused(payload: str, sentence: str) -> None:
    with pytest.raises(ProtocolError, match="8 elements as topk:2/8,2bit must be scales and a stream.*" + sentence):
        decoded(TopK(2, 8, "2bit"), bytes.fromhex(payload), Layout.flat(8))


@pytest.mark.parametrize("values", ["fp16", "fp32"])
def test_values_that_are_not_finite_are_refused(values: str) -> None:
    width = 2 if values == "fp16" else 4
    payload = bytearray(encoded(TopK(1, 1, values), np.ones(1, np.float32)))  # "0" "1", then the value
    value = int.from_bytes(np.array([np.inf], f"<f{width}").tobytes(), "little")
    payload = bytearray((value << 2 | 2).to_bytes(width + 1, "little"))
    with pytest.raises(ProtocolError, match="a value that is not finite"):
        decoded(TopK(1, 1, values), bytes(payload), Layout.flat(1))


@pytest.mark.parametrize(
    ("spec", "shortest"),
    [
        ("topk:64/4096", "topk:64/4096"),
        ("topk:64/4096,fp16", "topk:64/4096"),
        ("topk:064/4096,2bit", "topk:64/4096,2bit"),
        ("topk:65536/65536,1bit", "topk:65536/65536,1bit"),
    ],
)
def test_specs(spec: str, shortest: str) -> None:
    assert codec_from_spec(spec).spec == shortest


@pytest.mark.parametrize(
    "spec",
    [
        "topk",
        "topk:",
        "topk:64",
        "topk:0/8",
        "topk:9/8",
        "topk:1/65537",
        "topk:-1/8",
        "topk:1/8,3bit",
        "topk:1/8,2bit,",
    ],
)
def test_other_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sync_codec must be topk:K/CHUNK\[,fp32\|fp16\|.*K/CHUNK m"):
        codec_from_spec(spec)
