"""Casts: rounded as Paddle rounds, refused where they would turn into infinities, little-endian on the wire."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.cast import Bfloat16, Float16, Float32
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout
from paddlenlp_nebula.errors import ProtocolError
from tests.codec.table import TURN, decoded, encoded, there_and_back

LARGEST_BF16 = np.array([0x7F7F0000], dtype=np.uint32).view(np.float32)[0]

finite_in_bf16 = arrays.arrays(
    np.float32, st.integers(1, 64), elements=st.floats(-float(LARGEST_BF16), float(LARGEST_BF16), width=32)
)
# Paddle's own cast of numbers too small for a normal half is wrong on CPU (4.9e-27 becomes 1.2e-7).
normal_in_fp16 = arrays.arrays(
    np.float32,
    st.integers(1, 64),
    elements=st.floats(2**-14, 65504, width=32) | st.floats(-65504, -(2**-14), width=32) | st.just(0.0),
)


def by_paddle(vector: Float32Vector, dtype: str) -> Float32Vector:
    return paddle.to_tensor(vector).astype(dtype).astype("float32").numpy()


@given(finite_in_bf16)
def test_bf16_rounds_as_paddle_does(vector: Float32Vector) -> None:
    np.testing.assert_array_equal(there_and_back(Bfloat16(), vector), by_paddle(vector, "bfloat16"))


@given(normal_in_fp16)
def test_fp16_rounds_as_paddle_does(vector: Float32Vector) -> None:
    np.testing.assert_array_equal(there_and_back(Float16(), vector), by_paddle(vector, "float16"))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1.0
        (0x3F808000, 0x3F80),  # half way: to even, down
        (0x3F818000, 0x3F82),  # half way: to even, up
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0xBF818000, 0xBF82),
        (0x00008000, 0x0000),  # the same among the denormal
        (0x00018000, 0x0002),
        (0x3FFF8000, 0x4000),  # into the next power of two
        (0x7F7F7FFF, 0x7F7F),  # the last that stays finite
        (0x80000000, 0x8000),
    ],
)
def test_bf16_rounds_to_nearest_even(bits: int, rounded: int) -> None:
    vector = np.array([bits], dtype=np.uint32).view(np.float32)
    assert encoded(Bfloat16(), vector) == rounded.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("codec", "value", "sentence"),
    [
        (Float16(), 65520.0, "its largest magnitude 65520 exceeds fp16's 65504: use bf16"),
        (Float16(), -1e30, r"its largest magnitude 1e\+30 exceeds fp16"),
        (
            Bfloat16(),
            np.array([0x7F7F8000], dtype=np.uint32).view(np.float32)[0],
            "rounds to infinity in bf16: use fp32",
        ),
        (Bfloat16(), -np.finfo(np.float32).max, r"its largest magnitude 3.40282e\+38 rounds to infinity"),
    ],
)
def test_what_would_become_infinite_is_refused(codec: Codec, value: float, sentence: str) -> None:
    with pytest.raises(OverflowError, match=sentence):
        encoded(codec, np.array([0.0, value, 1.0], dtype=np.float32))


def test_fp16_takes_its_largest_number() -> None:
    vector = np.array([65504.0, 65519.0], dtype=np.float32)
    np.testing.assert_array_equal(there_and_back(Float16(), vector), [65504.0, 65504.0])


@pytest.mark.parametrize(
    ("codec", "wire"), [(Float32(), "0000803f000020c1"), (Float16(), "003c00c9"), (Bfloat16(), "803f20c1")]
)
def test_the_wire_is_little_endian(codec: Codec, wire: str) -> None:
    assert encoded(codec, np.array([1.0, -10.0], dtype=np.float32)).hex() == wire


def test_fp32_copies_nothing() -> None:
    vector, layout = np.arange(4, dtype=np.float32), Layout.flat(4)
    codec = Float32()
    assert np.shares_memory(codec.decode(codec.encode(vector, layout, {}, TURN), layout), vector)


@pytest.mark.parametrize("codec", [Float32(), Float16(), Bfloat16()], ids=lambda codec: codec.spec)
@given(vector=normal_in_fp16)
def test_what_fits_stays_as_it_is(codec: Codec, vector: Float32Vector) -> None:
    once = there_and_back(codec, vector)
    np.testing.assert_array_equal(there_and_back(codec, once.copy()), once)
    np.testing.assert_allclose(once, vector, rtol=2**-8)


@pytest.mark.parametrize("codec", [Float32(), Float16(), Bfloat16()], ids=lambda codec: codec.spec)
def test_the_sign_of_zero_and_the_smallest_number(codec: Codec) -> None:
    result = there_and_back(codec, np.array([-0.0, 1e-45, -1e-45], dtype=np.float32))
    assert np.signbit(result[0])
    np.testing.assert_allclose(result, [0, 1e-45, -1e-45], atol=2**-24)


def test_decoding_says_what_is_wrong() -> None:
    with pytest.raises(ProtocolError, match="3 elements as bf16 must be 6 bytes, got 5"):
        decoded(Bfloat16(), bytes(5), Layout.flat(3))
