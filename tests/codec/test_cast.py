"""Casts: rounded as Paddle rounds, refused where they would turn into infinities, little-endian on the wire."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.cast import Bfloat16, Float16, Float32
from paddlenlp_nebula.codec.codec import Codec, Float32Vector

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
    codec = Bfloat16()
    np.testing.assert_array_equal(codec.decode(codec.encode(vector), len(vector)), by_paddle(vector, "bfloat16"))


@given(normal_in_fp16)
def test_fp16_rounds_as_paddle_does(vector: Float32Vector) -> None:
    codec = Float16()
    np.testing.assert_array_equal(codec.decode(codec.encode(vector), len(vector)), by_paddle(vector, "float16"))


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
    assert bytes(Bfloat16().encode(vector)) == rounded.to_bytes(2, "little")


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
        codec.encode(np.array([0.0, value, 1.0], dtype=np.float32))


def test_fp16_takes_its_largest_number() -> None:
    vector = np.array([65504.0, 65519.0], dtype=np.float32)
    np.testing.assert_array_equal(Float16().decode(Float16().encode(vector), 2), [65504.0, 65504.0])


@pytest.mark.parametrize(
    ("codec", "wire"), [(Float32(), "0000803f000020c1"), (Float16(), "003c00c9"), (Bfloat16(), "803f20c1")]
)
def test_the_wire_is_little_endian(codec: Codec, wire: str) -> None:
    assert bytes(codec.encode(np.array([1.0, -10.0], dtype=np.float32))).hex() == wire


def test_fp32_copies_nothing() -> None:
    vector = np.arange(4, dtype=np.float32)
    decoded = Float32().decode(Float32().encode(vector), 4)
    assert np.shares_memory(decoded, vector)
