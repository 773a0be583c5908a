"""Fingerprints that tie an answer to its question: of the batch, the tokenizer, the teacher, and what was asked for."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.tensors import Tensor, hash_into

__all__ = ["Identity", "batch_fingerprint", "teacher_fingerprint", "tokenizer_fingerprint"]

_SPEC_BYTES = 512
_HEADER = struct.Struct("!Q16s16s16sH")
_FINGERPRINT = re.compile("[0-9a-f]{32}")

# Case, digits, accents, scripts without blanks, what is in no vocabulary: two tokenizers of one vocabulary that split
# or normalise differently give other ids for some of this.
_PROBES = (
    "The Quick brown fox, jumping over 1,234.56 lazy dogs; isn't it?",
    "naïve café Straße ÅNGSTRÖM  two  blanks\ttab\nline",
    "東京都に行く 你好,世界 Привет мир مرحبا 🙂 \u200b\ufeff",
)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of what a tokenizer does, wherever its files lie: 32 hexadecimal digits.

    The tokens in the order of their ids, the special ones and what they are for, and the ids of a few sentences.

    Args:
        tokenizer: one of PaddleNLP's.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ids = [list(map(int, tokenizer(probe)["input_ids"])) for probe in _PROBES]
    return _hash_json([list(map(str, tokens)), special, ids])


def teacher_fingerprint(model: Tensor, settings: Mapping[str, Any] | None = None) -> str:
    """Of what a teacher answers by: 32 hexadecimal digits.

    Its class, the numbers that its configuration class adds to the general one (sizes, activation, epsilons; neither
    paths and versions nor how it is spread over devices), and every parameter and buffer.

    Args:
        model: a layer; of PaddleNLP's models the ``config`` counts, too.
        settings: what else its answers depend on, such as how it generates sequences.
    """
    digest = xxhash.xxh3_128()
    digest.update(_hash_json([type(model).__name__, _own_settings(model), dict(settings or {})]).encode())
    state = model.state_dict()
    for name in sorted(state):
        hash_into(digest, name, state[name])
    return digest.hexdigest()


def _own_settings(model: Any) -> dict[str, Any]:
    from paddlenlp.transformers import PretrainedConfig

    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return {}
    general = PretrainedConfig().to_dict()
    return {name: value for name, value in config.to_dict().items() if name not in general or name == "model_type"}


def batch_fingerprint(inputs: Mapping[str, npt.NDArray[Any]]) -> str:
    """Of a batch's ids, masks and the like, by name, whatever integer dtype they have: 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name], dtype="<i8")
        digest.update(f"{name} {list(array.shape)} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _hash_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


@dataclass(frozen=True)
class Identity:
    """What an answer is an answer to.

    Attributes:
        position: of the batch in the data: how many were before it, over all epochs.
        batch, tokenizer, teacher: fingerprints.
        knowledge: what is asked for, as `knowledge.registry.spec_of` writes it.
    """

    position: int
    batch: str
    tokenizer: str
    teacher: str
    knowledge: str

    @property
    def key(self) -> str:
        """The same for the same answer: all but the position, which is another one in the next epoch."""
        return _hash_json([self.batch, self.source])

    @property
    def source(self) -> str:
        """The same for all answers that may be mixed: teacher, tokenizer and what is asked for."""
        return _hash_json([self.tokenizer, self.teacher, self.knowledge])

    def check(self, other: Identity, sender: str) -> None:
        """Whether something from ``sender`` is about the same thing.

        Raises:
            ProtocolError: it is not; it names what differs, with both sides' values.
        """
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        if names:
            expected, got = (", ".join(f"{name} {getattr(side, name)}" for name in names) for side in (self, other))
            raise ProtocolError(
                f"what {sender} sent must be about {expected}, got {got}: do both sides use the same data, tokenizer "
                "and recipe?"
            )

    def pack(self) -> bytes:
        """Big-endian: position u64, three fingerprints of 16 bytes, length of the spec u16, the spec in ASCII."""
        spec = self.knowledge.encode("ascii")
        prints = (bytes.fromhex(value) for value in (self.batch, self.tokenizer, self.teacher))
        return _HEADER.pack(self.position, *prints, len(spec)) + spec

    @classmethod
    def parse(cls, data: memoryview, sender: str) -> tuple[Identity, memoryview]:
        """An identity at the start of ``data``, and what comes after it.

        Raises:
            ProtocolError: there is none.
        """
        if data.nbytes < _HEADER.size:
            raise ProtocolError(f"{sender} must say what it is about in {_HEADER.size} bytes, got {data.nbytes}")
        position, batch, tokenizer, teacher, length = _HEADER.unpack_from(data)
        end = _HEADER.size + length
        spec = bytes(data[_HEADER.size : end])
        if length > _SPEC_BYTES or len(spec) != length or not re.fullmatch(rb"[ -~]*", spec):
            raise ProtocolError(f"{sender} must name at most {_SPEC_BYTES} bytes of knowledge, got {spec[:80]!r}")
        return cls(position, batch.hex(), tokenizer.hex(), teacher.hex(), spec.decode("ascii")), data[end:]

    def __post_init__(self) -> None:
        prints = (self.batch, self.tokenizer, self.teacher)
        assert all(_FINGERPRINT.fullmatch(value) for value in prints), prints
        assert 0 <= self.position < 1 << 64
        assert len(self.knowledge) <= _SPEC_BYTES
