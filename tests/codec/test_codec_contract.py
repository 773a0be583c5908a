"""What every codec must do, over the whole registry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddlenlp_nebula.codec.codec import Codec, Float32Vector
from paddlenlp_nebula.codec.registry import CODECS, codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError

every_codec = pytest.mark.parametrize("codec", [codec_from_spec(spec) for spec in CODECS], ids=list(CODECS))

vectors = arrays.arrays(
    np.float32, st.integers(1, 300), elements=st.floats(-60000, 60000, width=32, allow_subnormal=True)
)


def there_and_back(codec: Codec, vector: Float32Vector) -> Float32Vector:
    return codec.decode(memoryview(bytes(codec.encode(vector))), len(vector))


@every_codec
@given(vector=vectors)
def test_round_trip(codec: Codec, vector: Float32Vector) -> None:
    before = vector.copy()
    payload = codec.encode(vector)
    assert (payload.nbytes, payload.format, payload.contiguous) == (codec.estimate(len(vector)), "B", True)
    decoded = codec.decode(payload, len(vector))
    assert decoded.dtype == np.float32
    assert decoded.shape == vector.shape
    np.testing.assert_array_equal(vector, before)  # encoding changes nothing
    np.testing.assert_allclose(decoded, vector, rtol=2**-8, atol=2**-24)
    np.testing.assert_array_equal(there_and_back(codec, decoded.copy()), decoded)  # idempotent
    if codec.lossless:
        np.testing.assert_array_equal(decoded.view(np.uint32), vector.view(np.uint32))


@every_codec
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 4095, 4097, 258_048])
def test_sizes_and_zeros(codec: Codec, numel: int) -> None:
    decoded = there_and_back(codec, np.zeros(numel, dtype=np.float32))
    np.testing.assert_array_equal(decoded, np.zeros(numel))
    assert len(codec.encode(np.ones(numel, dtype=np.float32))) == codec.estimate(numel)


@every_codec
@pytest.mark.parametrize("change", [-4, -2, -1, 1, 2, 1000])
def test_a_payload_of_another_size_does_not_decode(codec: Codec, change: int) -> None:
    payload = bytes(codec.encode(np.ones(9, dtype=np.float32)))
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(
        ProtocolError, match=f"9 elements as {codec.spec} must be {len(payload)} bytes, got {len(wrong)}"
    ):
        codec.decode(memoryview(wrong), 9)
    with pytest.raises(ProtocolError, match="got 0"):
        codec.decode(memoryview(b""), 9)


@every_codec
def test_encoding_keeps_the_sign_of_zero_and_the_smallest_number(codec: Codec) -> None:
    decoded = there_and_back(codec, np.array([-0.0, 1e-45, -1e-45], dtype=np.float32))
    assert np.signbit(decoded[0])
    np.testing.assert_allclose(decoded, [0, 1e-45, -1e-45], atol=2**-24)


@every_codec
def test_it_is_found_by_its_spec(codec: Codec) -> None:
    assert CODECS[codec.spec] is type(codec)


@pytest.mark.parametrize("spec", ["", "fp64", "FP32", "fp32 ", "bf16,2bit", "__import__('os')"])
def test_other_specs_are_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError, match="sync_codec must be 'fp32' or 'bf16' or 'fp16', got"):
        codec_from_spec(spec)
