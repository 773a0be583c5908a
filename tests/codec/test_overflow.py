"""Vectors are finite; their sums with what was not sent need not be: then encoding says so, on the host and on a device."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.backend.device import DeviceBackend
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.codec.codec import BEYOND_FLOAT32, Layout, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec

LAYOUT = Layout(((40, 30), (50,)))
SPECS = [
    "int8",
    "int4:stochastic",
    "int2",
    "sign",
    "topk:3/10,fp32",
    "topk:3/10,4bit",
    "topk:3/10,1bit",
    "randomk:0.5",
    "randomk:0.5+int8",
    "randomk:0.5+topk:3/10,2bit",
    "dgc:0.01",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", [HOST, DeviceBackend(paddle.CPUPlace())], ids=["host", "device"])
def test_a_residual_that_overflows_is_an_error(spec: str, backend) -> None:
    codec = codec_from_spec(spec)
    codec = codec if codec.own_feedback else ErrorFeedback(codec)
    state = codec.init(LAYOUT)
    state["residual"][:] = np.where(np.arange(LAYOUT.numel) % 2, np.float32(3e38), np.float32(-3e38))
    encoder, remembered = backend.encoder(codec), backend.remember(state)
    vector = np.where(np.arange(LAYOUT.numel) % 2, np.float32(3e38), np.float32(-3e38)).astype(np.float32)
    given = backend.copy(vector) if backend is HOST else paddle.to_tensor(vector, place=paddle.CPUPlace())
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(OverflowError, match=BEYOND_FLOAT32):
        encoder.encode(given, LAYOUT, remembered, Turn(1, 0, 0))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "topk:3/10,4bit" not in spec])
@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_large_numbers_alone_are_none(spec: str, value: float) -> None:
    codec = codec_from_spec(spec)
    vector = np.full(LAYOUT.numel, value, dtype=np.float32)
    codec.encode(vector, LAYOUT, codec.init(LAYOUT), Turn(1, 0, 0))


@pytest.mark.parametrize("factors", ["fp32", "bf16"])
def test_a_product_that_overflows_is_named_for_both_formats(factors: str) -> None:
    codec, vector = codec_from_spec(f"lowrank:4,{factors}"), np.full(LAYOUT.numel, 2e38, dtype=np.float32)
    with pytest.raises(
        OverflowError, match=r"a matrix with the largest magnitude 2e\+38 has a product outside float32"
    ):
        codec.encode(vector, LAYOUT, codec.init(LAYOUT), Turn(1, 0, 0))
