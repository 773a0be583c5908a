"""The closed registry of codecs: spec text -> codec.

A spec is ``FAMILY``, or ``FAMILY:OPTION,OPTION...``: ``fp32``, ``int8``, ``topk:64/4096,2bit``. Random-k may
be followed by the spec of what it hands its elements to: ``randomk:0.1+topk:64/4096,4bit``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from paddlenlp_nebula.codec.cast import Bfloat16, Float16, Float32
from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.dgc import DeepGradientCompression
from paddlenlp_nebula.codec.lowrank import LowRank
from paddlenlp_nebula.codec.quantize import Int2, Int4, Int8, Sign
from paddlenlp_nebula.codec.randomk import RandomK
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["CODECS", "codec_from_spec"]

CODECS: dict[str, type[Codec]] = {
    "fp32": Float32,
    "bf16": Bfloat16,
    "fp16": Float16,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "sign": Sign,
    "topk": TopK,
    "lowrank": LowRank,
    "randomk": RandomK,
    "dgc": DeepGradientCompression,
}
"""Family -> codec."""


def codec_from_spec(spec: str) -> Codec:
    """The codec that ``sync_codec=spec`` names.

    Raises:
        ConfigurationError: there is no such codec, or an option is out of range.
    """
    first, plus, rest = spec.partition("+")
    if not plus:
        return _single(spec, "sync_codec", CODECS)
    if CODECS.get(first.partition(":")[0]) is not RandomK:
        raise ConfigurationError([f"sync_codec must have {RandomK.grammar} before a '+', got {spec!r}"])
    codec = _single(first, "sync_codec", CODECS)
    assert isinstance(codec, RandomK)
    takes = {family: codec for family, codec in CODECS.items() if RandomK.takes(codec)}
    return RandomK(codec.fraction, _single(rest, "after '+', sync_codec", takes))


def _single(spec: str, where: str, codecs: Mapping[str, type[Codec]]) -> Codec:
    """One of these codecs, from a spec without ``+``; ``where`` begins the sentence of an error."""
    family, colon, rest = spec.partition(":")
    if not colon:
        family, colon, rest = spec.partition(",")  # without the option that follows a colon: int8,stochastic
    if family not in codecs:
        allowed = ", ".join(codec.grammar for codec in codecs.values())
        near = difflib.get_close_matches(family.lower(), codecs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError([f"{where} must be one of {allowed}, got {spec!r}{hint}"])
    codec = codecs[family]
    try:
        return codec.parse(rest.split(",") if colon else [])
    except ValueError as error:
        raise ConfigurationError([f"{where} must be {codec.grammar}, got {spec!r}: {error}"]) from None
