"""What a teacher offers and what a student wishes: small JSON objects that both compare, in the same words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.distill.knowledge.knowledge import Extent, Knowledge
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec, spec_of
from paddlenlp_nebula.distill.knowledge.tokens import GeneratedSequence
from paddlenlp_nebula.distill.knowledge.vectors import AttentionRelations, Hidden
from paddlenlp_nebula.errors import NebulaError, ProtocolError

__all__ = ["Inputs", "Offer", "Wish", "disagreements", "note_of"]

Inputs: TypeAlias = Mapping[str, npt.NDArray[np.int64]]
"""Of a teacher's model, by name, one or two dimensions each, the first being the samples."""

T = TypeVar("T", "Offer", "Wish")


@dataclass(frozen=True)
class Wish:
    """What a student asks for.

    Attributes:
        tokenizer: fingerprint (`identity.tokenizer_fingerprint`).
        tokens: that it knows; every id of a question is below.
        vocabulary: of the answers: tokens, or classes.
        knowledge: as `knowledge.registry.spec_of` writes it.
        longest: tokens of a sample at most.
        places: the input whose positions that are not 0 get an answer; "" for one answer for each sample.
        data: what the student's batches follow from (data, seed, sizes), as a fingerprint, if they need not be sent
            because the teacher derives the same ones; "" if they are sent.
    """

    tokenizer: str
    tokens: int
    vocabulary: int
    knowledge: str
    longest: int
    places: str = "attention_mask"
    data: str = ""

    @classmethod
    def parse(cls, note: Mapping[str, Any], sender: str) -> Wish:
        """From the sender's note.

        Raises:
            ProtocolError: it is none.
        """
        wish = _parse(cls, note, sender)
        try:
            spec = spec_of(wish.kinds)
        except NebulaError as error:
            raise ProtocolError(f"the knowledge that {sender} wishes is none: {error}") from None
        if spec != wish.knowledge:
            raise ProtocolError(f"the knowledge that {sender} wishes must be written {spec!r}, got {wish.knowledge!r}")
        return wish

    @cached_property
    def kinds(self) -> tuple[Knowledge, ...]:
        """Of knowledge."""
        return knowledge_from_spec(self.knowledge)

    def extent(self, inputs: Inputs, offer: Offer) -> Extent:
        """What the answer about a batch must cover.

        Raises:
            NebulaError: the batch has inputs that do not belong together, none that says which positions count, or more
                than the two sides have agreed on.
        """
        shapes = {name: list(array.shape) for name, array in inputs.items()}
        samples = {array.shape[0] for array in inputs.values() if array.ndim}
        if len(samples) != 1 or not all(array.ndim for array in inputs.values()):
            raise NebulaError(f"the inputs of a batch must have one number of samples, got {shapes}")
        if self.places and self.places not in inputs:
            raise NebulaError(
                f"a batch must have the input {self.places!r}, which says what positions count, got {shapes}"
            )
        if any(array.ndim > 1 and array.shape[1] > self.longest for array in inputs.values()):
            raise NebulaError(f"a sample must have at most {self.longest} tokens, as agreed, got inputs of {shapes}")
        for name, array in inputs.items():
            if name.endswith("input_ids") and array.size and not 0 <= array.min() <= array.max() < self.tokens:
                raise NebulaError(
                    f"{name} must be from 0 to {self.tokens - 1}, got {int(array.min())} to {int(array.max())}"
                )
        rows = int(np.count_nonzero(inputs[self.places])) if self.places else min(samples)
        return Extent(rows, min(samples), self.vocabulary, offer.width, offer.generates)


@dataclass(frozen=True)
class Offer:
    """What a teacher can answer.

    Attributes:
        teacher: fingerprint (`identity.teacher_fingerprint`).
        tokenizer, tokens, vocabulary: as for `Wish`.
        knowledge: the only one that it tells, or "" for whatever it is asked for and has.
        width: of its hidden states.
        layers: L, the number of the last one.
        longest: tokens of a sample that it accepts.
        generates: tokens of a sequence that it generates, at most; 0 if it does not.
        data: what it can derive batches from, see `Wish`; "" if they must be sent.
        ahead: questions of one student that it takes before it has answered them.
    """

    teacher: str
    tokenizer: str
    tokens: int
    vocabulary: int
    knowledge: str
    width: int
    layers: int
    longest: int
    generates: int = 0
    data: str = ""
    ahead: int = 64

    @classmethod
    def parse(cls, note: Mapping[str, Any], sender: str) -> Offer:
        """From the sender's note.

        Raises:
            ProtocolError: it is none.
        """
        return _parse(cls, note, sender)


def disagreements(offer: Offer, wish: Wish, teacher: str, student: str) -> list[str]:
    """Why this teacher cannot answer this student: a sentence each with both sides' values, the same on both sides.

    Args:
        offer, wish: what they have told each other.
        teacher, student: the clusters' names.
    """

    def differ(what: str, has: object, wants: object, remedy: str) -> str:
        return f"teacher {teacher!r} has {what} {has} but student {student!r} {wants}: {remedy}"

    found = []
    if offer.tokens != wish.tokens:
        found.append(differ("a tokenizer of", f"{offer.tokens} tokens", wish.tokens, "use one tokenizer"))
    elif offer.tokenizer != wish.tokenizer:
        remedy = "they split or number tokens differently, use one tokenizer"
        found.append(differ("the tokenizer", offer.tokenizer, wish.tokenizer, remedy))
    elif offer.vocabulary != wish.vocabulary:
        found.append(
            differ("a vocabulary of", offer.vocabulary, wish.vocabulary, "both must tell the same things apart")
        )
    if offer.knowledge not in ("", wish.knowledge):
        remedy = "set the same distill_knowledge on both"
        found.append(differ("distill_knowledge", repr(offer.knowledge), repr(wish.knowledge), remedy))
    for kind in wish.kinds:
        layers = (
            kind.layers if isinstance(kind, Hidden) else [kind.layer] if isinstance(kind, AttentionRelations) else []
        )
        if any(layer > offer.layers for layer in layers):
            remedy = "ask for layers that it has"
            found.append(differ("the layers", f"0 to {offer.layers}", f"asks for {kind.spec!r}", remedy))
        if isinstance(kind, GeneratedSequence) and not offer.generates:
            found.append(differ("no", "generated sequences", f"asks for {kind.spec!r}", "let it generate"))
    if wish.longest > offer.longest:
        remedy = "cut the samples, or let the teacher accept more"
        found.append(differ("room for samples of", f"{offer.longest} tokens", f"sends up to {wish.longest}", remedy))
    if wish.data and wish.data != offer.data:
        remedy = "use the same data, seed and batch size, or send the batches"
        found.append(differ("the data", offer.data or "of no batch", f"has {wish.data}", remedy))
    return found


_TEXT: dict[str, str] = {
    "teacher": "[0-9a-f]{32}",
    "tokenizer": "[0-9a-f]{32}",
    "knowledge": "[ -~]{0,512}",
    "places": "([a-z][a-z0-9_]{0,31})?",
    "data": "([0-9a-f]{32})?",
}
_MOST = 1 << 24  # of every number


def _parse(cls: type[T], note: Mapping[str, Any], sender: str) -> T:
    names = [field.name for field in fields(cls)]
    if note.keys() != set(names):
        raise ProtocolError(f"{sender} must say {', '.join(names)}, got {', '.join(note)!r:.200}")
    for name, value in note.items():
        if not (_is_text(value, _TEXT[name]) if name in _TEXT else _is_number(value)):
            raise ProtocolError(f"{sender} must give a proper {name}, got {value!r:.80}")
    return cls(**note)


def _is_text(value: object, form: str) -> bool:
    return isinstance(value, str) and re.fullmatch(form, value) is not None


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def note_of(side: Offer | Wish) -> dict[str, Any]:
    """What `parse` reads."""
    return asdict(side)
