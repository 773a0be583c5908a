"""The closed registry of knowledge: spec text -> what travels.

A spec is one or more of the kinds with ``+`` between them: ``logits:top32``, ``logits:top32,fp16 + hidden:3/6``.
"""

from __future__ import annotations

import difflib
import re

from paddlenlp_nebula.distill.knowledge.knowledge import Knowledge
from paddlenlp_nebula.distill.knowledge.soft_labels import LogitsTopK
from paddlenlp_nebula.distill.knowledge.tokens import GeneratedSequence, Labels
from paddlenlp_nebula.distill.knowledge.vectors import AttentionRelations, Hidden
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["KNOWLEDGE", "knowledge_from_spec", "spec_of"]

KNOWLEDGE: dict[str, type[Knowledge]] = {
    "logits": LogitsTopK,
    "hidden": Hidden,
    "attention-relations": AttentionRelations,
    "sequence": GeneratedSequence,
    "labels": Labels,
}
"""Family -> kind of knowledge."""


def knowledge_from_spec(spec: str) -> tuple[Knowledge, ...]:
    """What ``distill_knowledge=spec`` names, in its order.

    Raises:
        ConfigurationError: there is no such kind, an option is out of range, or two of them are about the same arrays.
    """
    kinds = tuple(_single(part) for part in re.sub(r"\s", "", spec).split("+"))
    names = [name for kind in kinds for name in kind.names()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            [f"distill_knowledge must name everything once, got {', '.join(twice)} twice: {spec!r}"]
        )
    return kinds


def spec_of(kinds: tuple[Knowledge, ...]) -> str:
    """The shortest text that names them, the same on both sides however they were written."""
    return "+".join(kind.spec for kind in kinds)


def _single(spec: str) -> Knowledge:
    family, colon, rest = spec.partition(":")
    if family not in KNOWLEDGE:
        allowed = ", ".join(kind.grammar for kind in KNOWLEDGE.values())
        near = difflib.get_close_matches(family.lower(), KNOWLEDGE, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError([f"distill_knowledge must be one or more of {allowed}, got {spec!r}{hint}"])
    kind = KNOWLEDGE[family]
    try:
        return kind.parse(rest.split(",") if colon else [])
    except ValueError as error:
        raise ConfigurationError([f"distill_knowledge must be {kind.grammar}, got {spec!r}: {error}"]) from None
