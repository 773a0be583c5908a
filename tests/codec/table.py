"""The table of codecs that every contract test runs over."""

from __future__ import annotations

import numpy as np

from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, Turn
from paddlenlp_nebula.codec.registry import codec_from_spec

SPECS = [
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:64,stochastic",
    "int4",
    "int4:1024",
    "int4:stochastic",
    "int2",
    "int2:16",
    "int2:128,stochastic",
    "sign",
    "sign:32",
    "topk:64/4096,2bit",
    "topk:64/4096",
    "topk:5/64,4bit",
    "topk:3/10,1bit",
    "topk:1/1,fp32",
    "lowrank:2",
    "lowrank:4,bf16",
    "randomk:0.1",
    "randomk:0.7+bf16",
    "randomk:1",
    "randomk:0.1+topk:64/4096,4bit",
    "dgc:0.01",
    "dgc:0.05,momentum=0.5,clip=1",
]
"""One or more specs of each family; each family of the registry must occur."""

FED_BACK = ["fp16", "int4", "int2", "sign:32", "topk:64/4096,2bit", "lowrank:2"]
"""Specs that are also tried with error feedback around them."""

TURN = Turn(round=1, part=0, member=0)


def encoded(codec: Codec, vector: Float32Vector, layout: Layout | None = None, turn: Turn = TURN) -> bytes:
    """The payload of a vector from a fresh state."""
    layout = layout or Layout.flat(len(vector))
    return bytes(codec.encode(vector, layout, codec.init(layout), turn))


def decoded(codec: Codec, payload: bytes, layout: Layout) -> Float32Vector:
    return codec.decode(memoryview(payload), layout)


def there_and_back(codec: Codec, vector: Float32Vector, layout: Layout | None = None) -> Float32Vector:
    return decoded(codec, encoded(codec, vector, layout), layout or Layout.flat(len(vector)))


def named(spec: str) -> Codec:
    return codec_from_spec(spec)


def normal(numel: int, seed: int = 0) -> Float32Vector:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)
