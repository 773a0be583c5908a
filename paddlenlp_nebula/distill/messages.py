"""Questions and answers, as bytes: fixed layouts, strictly parsed, with limits before any allocation.

Both begin with a magic number and an `Identity`. A question goes on with the batch's inputs: their number u8, then for
each the length of its name u8, the name, its form u8, its dimensions u8 (1 or 2) and each u32; then all elements. An
answer goes on with the number of its parts u8, their lengths u64, and the parts, one for each kind of knowledge. All
is big-endian but elements and parts.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.distill.knowledge.registry import spec_of
from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["MOST_ELEMENTS", "Answer", "Question"]

MOST_ELEMENTS = 1 << 22
"""Of all inputs of a question; parsing them takes 10 bytes for each at most."""

_MOST_INPUTS, _MOST_PARTS = 8, 8
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
# Form -> dtype; the first one that has room for all elements is used. 0: single bits.
_FORMS: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<i2"), 3: np.dtype("<i4")}


@dataclass(frozen=True)
class Question:
    """What a student's leader asks.

    Attributes:
        identity: of the answer that is wanted.
        inputs: of the teacher's model by name, int64, one or two dimensions each; empty where the teacher takes the
            batch from its own copy of the data and compares the fingerprint.
    """

    identity: Identity
    inputs: Mapping[str, npt.NDArray[np.int64]]

    def pack(self) -> bytes:
        """As bytes.

        Raises:
            NebulaError: there are too many inputs or elements, or a name, a shape or a number does not fit.
        """
        if len(self.inputs) > _MOST_INPUTS or sum(array.size for array in self.inputs.values()) > MOST_ELEMENTS:
            raise NebulaError(
                f"a question must have at most {_MOST_INPUTS} inputs of {MOST_ELEMENTS} elements in all, got "
                f"{', '.join(f'{name} {list(array.shape)}' for name, array in self.inputs.items())}: use smaller batches"
            )
        heads, bodies = [], []
        for name in sorted(self.inputs):
            array = self.inputs[name]
            form = _form(array)
            if not _NAME.fullmatch(name) or array.ndim not in (1, 2) or form is None:
                raise NebulaError(
                    f"an input of a question must have a name in lower case, one or two dimensions and numbers of 32 "
                    f"bits, got {name!r} of shape {list(array.shape)}"
                )
            heads.append(struct.pack(f"!B{len(name)}sBB", len(name), name.encode(), form, array.ndim))
            heads.append(struct.pack(f"!{array.ndim}I", *array.shape))
            bits = np.packbits(array.astype(np.uint8).ravel(), bitorder="little") if form == 0 else None
            bodies.append((array.astype(_FORMS[form]) if bits is None else bits).tobytes())
        return b"".join([_QUESTION, self.identity.pack(), bytes([len(self.inputs)]), *heads, *bodies])

    @classmethod
    def parse(cls, data: memoryview, sender: str) -> Question:
        """A question from ``sender``.

        Raises:
            ProtocolError: it is none, or its inputs are not the batch that it names.
        """
        rest = _after(_QUESTION, data, f"a question of {sender}")
        identity, rest = Identity.parse(rest, f"a question of {sender}")
        reader = _Reader(rest, f"a question of {sender}")
        heads = [reader.input() for _ in range(reader.number("B", _MOST_INPUTS))]
        if sum(prod(shape) for _, _, shape in heads) > MOST_ELEMENTS:
            raise reader.refusal(f"at most {MOST_ELEMENTS} elements, got inputs {[head[2] for head in heads]}")
        names = [name for name, _, _ in heads]
        if names != sorted(set(names)):
            raise reader.refusal(f"inputs in the order of their names, got {', '.join(names)}")
        inputs = {name: reader.elements(form, shape) for name, form, shape in heads}
        reader.end()
        if inputs and batch_fingerprint(inputs) != identity.batch:
            raise reader.refusal(f"the batch {identity.batch}, got {batch_fingerprint(inputs)}")
        return cls(identity, inputs)


@dataclass(frozen=True)
class Answer:
    """What a teacher tells.

    Attributes:
        identity: of the question.
        parts: bytes for each kind of knowledge that the question names, in its order.
    """

    identity: Identity
    parts: tuple[memoryview, ...]

    @classmethod
    def to(cls, question: Identity, kinds: Sequence[Knowledge], arrays: Arrays, extent: Extent) -> Answer:
        """The answer to a question.

        Args:
            question: that it answers; its ``knowledge`` is what the kinds are called.
            kinds: of knowledge.
            arrays: what all of them are made of.
            extent: of the batch.

        Raises:
            NebulaError: an array is missing, of another shape, or not finite.
        """
        return cls(question, tuple(kind.encode(arrays, extent) for kind in kinds))

    def arrays(self, question: Identity, kinds: Sequence[Knowledge], extent: Extent, sender: str) -> Arrays:
        """What it tells, provided that it is the answer to this question.

        Raises:
            ProtocolError: it is another one's, or not what the kinds of knowledge are made of.
        """
        question.check(self.identity, sender)
        if len(self.parts) != len(kinds) or spec_of(tuple(kinds)) != question.knowledge:
            raise ProtocolError(
                f"an answer of {sender} must have a part for each of {spec_of(tuple(kinds))}, got {len(self.parts)} for "
                f"{question.knowledge}"
            )
        arrays: Arrays = {}
        for kind, part in zip(kinds, self.parts, strict=True):
            arrays |= kind.decode(part, extent)
        return arrays

    def pack(self) -> bytes:
        """As bytes."""
        lengths = struct.pack(f"!B{len(self.parts)}Q", len(self.parts), *(part.nbytes for part in self.parts))
        return b"".join([_ANSWER, self.identity.pack(), lengths, *self.parts])

    @classmethod
    def parse(cls, data: memoryview, sender: str) -> Answer:
        """An answer from ``sender``; its parts are views of ``data``.

        Raises:
            ProtocolError: it is none.
        """
        rest = _after(_ANSWER, data, f"an answer of {sender}")
        identity, rest = Identity.parse(rest, f"an answer of {sender}")
        reader = _Reader(rest, f"an answer of {sender}")
        lengths = [reader.number("Q", data.nbytes) for _ in range(reader.number("B", _MOST_PARTS))]
        parts = tuple(reader.take(length) for length in lengths)
        reader.end()
        return cls(identity, parts)


_QUESTION, _ANSWER = b"NEQ1", b"NEA1"


def _form(array: npt.NDArray[Any]) -> int | None:
    """The shortest form that has room for all elements; None if none has."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low >= 0 and high <= 1:
        return 0
    limits = {form: np.iinfo(dtype) for form, dtype in _FORMS.items()}
    return next((form for form, limit in limits.items() if limit.min <= low and high <= limit.max), None)


def _after(magic: bytes, data: memoryview, what: str) -> memoryview:
    if bytes(data[:4]) != magic:
        raise ProtocolError(f"{what} must begin with {magic!r}, got {bytes(data[:4])!r}")
    return data[4:]


class _Reader:
    """Takes a message apart from its start; whatever it says, nothing is read beyond its end."""

    def __init__(self, data: memoryview, what: str) -> None:
        self._rest, self._what = data, what

    def refusal(self, expected: str) -> ProtocolError:
        return ProtocolError(f"{self._what} must be {expected}")

    def take(self, size: int) -> memoryview:
        if size > self._rest.nbytes:
            raise self.refusal(f"{size - self._rest.nbytes} bytes longer by its own numbers")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def number(self, form: str, most: int) -> int:
        (value,) = struct.unpack(f"!{form}", self.take(struct.calcsize(f"!{form}")))
        if value > most:
            raise self.refusal(f"a list of at most {most}, got {value}")
        return int(value)

    def input(self) -> tuple[str, int, tuple[int, ...]]:
        """Name, form and shape of an input."""
        name = bytes(self.take(self.number("B", 32))).decode("latin-1")
        form, dimensions = self.number("B", max(_FORMS)), self.number("B", 2)
        if not _NAME.fullmatch(name) or dimensions == 0:
            raise self.refusal(f"inputs with names and dimensions, got {name!r} with {dimensions}")
        return name, form, tuple(self.number("I", MOST_ELEMENTS) for _ in range(dimensions))

    def elements(self, form: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        size = prod(shape)
        if form == 0:
            packed = np.frombuffer(self.take(-(-size // 8)), dtype=np.uint8)
            return np.unpackbits(packed, count=size, bitorder="little").astype(np.int64).reshape(shape)
        dtype = _FORMS[form]
        return np.frombuffer(self.take(size * dtype.itemsize), dtype=dtype).astype(np.int64).reshape(shape)

    def end(self) -> None:
        if self._rest.nbytes:
            raise self.refusal(f"{self._rest.nbytes} bytes shorter by its own numbers")
