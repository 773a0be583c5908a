"""The closed registry of codecs: spec text -> codec."""

from __future__ import annotations

from paddlenlp_nebula.codec.cast import Bfloat16, Float16, Float32
from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["CODECS", "codec_from_spec"]

CODECS: dict[str, type[Codec]] = {codec.spec: codec for codec in (Float32, Bfloat16, Float16)}


def codec_from_spec(spec: str) -> Codec:
    """The codec that ``sync_codec=spec`` names.

    Raises:
        ConfigurationError: there is no such codec.
    """
    if spec not in CODECS:
        raise ConfigurationError([f"sync_codec must be {' or '.join(map(repr, CODECS))}, got {spec!r}"])
    return CODECS[spec]()
