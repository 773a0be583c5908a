"""Whether a student's losses and what it asks of its teacher fit together: found before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_nebula.distill.knowledge.knowledge import Knowledge
from paddlenlp_nebula.distill.knowledge.registry import spec_of
from paddlenlp_nebula.distill.knowledge.soft_labels import LogitsTopK
from paddlenlp_nebula.distill.knowledge.vectors import AttentionRelations, Hidden
from paddlenlp_nebula.distill.losses.spec import Term
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["check_agreement"]


def check_agreement(terms: Sequence[Term], kinds: Sequence[Knowledge]) -> None:
    """Every loss has the knowledge that it compares with, and no knowledge travels that no loss looks at.

    Args:
        terms: of ``distill_loss``.
        kinds: of ``distill_knowledge``; labels and sequences take the place of the data's own and need no loss.

    Raises:
        ConfigurationError: naming all that does not fit.
    """
    spec = spec_of(tuple(kinds))
    told = {name for kind in kinds for name in kind.names()}
    problems = []
    for term in terms:
        missing = sorted(_needed(term) - told)
        if missing:
            problems.append(
                f"distill_loss={term.label!r} needs {', '.join(missing)} in distill_knowledge, got {spec!r}"
            )
        for kind in kinds:
            if term.needs == "logits" and isinstance(kind, LogitsTopK) and kind.tau != term.options["tau"]:
                problems.append(
                    f"distill_loss={term.label!r} and distill_knowledge={kind.spec!r} must have one temperature, got "
                    f"{term.options['tau']:g} and {kind.tau:g}"
                )
    used = {name for term in terms for name in _needed(term)}
    for kind in kinds:
        unused = sorted(set(kind.names()) - used)
        if unused and isinstance(kind, LogitsTopK | Hidden | AttentionRelations):
            problems.append(f"distill_knowledge={kind.spec!r} must be used by a loss, got none for {', '.join(unused)}")
    if problems:
        raise ConfigurationError(problems)


def _needed(term: Term) -> set[str]:
    """The arrays that a term is computed from."""
    if term.needs == "logits":
        return {"ids", "log_probabilities", "log_tail"}
    prefixes = {"hidden": ("hidden",), "relations": ("q", "k", "v")}.get(term.needs, ())
    return {f"{prefix}.{teacher}" for prefix in prefixes for teacher, _ in term.layers}
