"""The closed registry of losses, and how a sum of them is written: ``kl:tau=2*0.7 + ce*0.3``.

A term is ``NAME[:OPTION,...][*WEIGHT]``; weights are those of `weights`. Layers are counted from 1, 0 being the
embeddings' output, and paired as TEACHER=STUDENT: ``hidden_mse:3=1/6=2``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paddlenlp_nebula.distill.losses.weights import Weight
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["LOSSES", "Loss", "Term", "terms_from_spec"]


@dataclass(frozen=True)
class Loss:
    """What a loss is called, and what it takes.

    Attributes:
        grammar: how it is written.
        needs: the knowledge that it compares with: ``logits``, ``hidden``, ``relations``, or ``labels``.
        options: name -> default.
        layered: whether it is between pairs of layers.
    """

    grammar: str
    needs: str
    options: Mapping[str, float] = field(default_factory=dict)
    layered: bool = False


_PAIRS = "TEACHER=STUDENT[/TEACHER=STUDENT...]"

LOSSES: dict[str, Loss] = {
    "kl": Loss("kl[:tau=T]", "logits", {"tau": 1.0}),
    "reverse_kl": Loss("reverse_kl[:tau=T]", "logits", {"tau": 1.0}),
    "jsd": Loss("jsd[:tau=T,beta=B]", "logits", {"tau": 1.0, "beta": 0.5}),
    "ce": Loss("ce", "labels"),
    "hidden_mse": Loss(f"hidden_mse:{_PAIRS}", "hidden", layered=True),
    "hidden_cosine": Loss(f"hidden_cosine:{_PAIRS}", "hidden", layered=True),
    "relations": Loss(f"relations:{_PAIRS}[,heads=A]", "relations", {"heads": 12.0}, layered=True),
}
"""Name -> loss."""

_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "tau": ("above 0 and at most 100", lambda value: 0.0 < value <= 100.0),
    "beta": ("above 0 and below 1", lambda value: 0.0 < value < 1.0),
    "heads": ("a whole number from 1 to 1024", lambda value: value.is_integer() and 1 <= value <= 1024),
}
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_PAIR = re.compile(r"(\d{1,4})=(\d{1,4})")


@dataclass(frozen=True)
class Term:
    """One loss of a sum.

    Attributes:
        name: in `LOSSES`.
        options: those of the loss, all of them.
        layers: (teacher's, student's) for each pair.
        weight: of it in the sum.
    """

    name: str
    options: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[tuple[int, int], ...] = ()
    weight: Weight = field(default_factory=Weight)

    @property
    def needs(self) -> str:
        """See `Loss`."""
        return LOSSES[self.name].needs

    @property
    def label(self) -> str:
        """The term without its weight, for logs."""
        pairs = "/".join(f"{teacher}={student}" for teacher, student in self.layers)
        defaults = LOSSES[self.name].options
        changed = [f"{name}={value:g}" for name, value in self.options.items() if value != defaults[name]]
        options = ",".join(filter(None, [pairs, *changed]))
        return self.name + ":" * bool(options) + options

    def __str__(self) -> str:
        return self.label if self.weight == Weight() else f"{self.label}*{self.weight}"


def terms_from_spec(spec: str) -> tuple[Term, ...]:
    """The terms of ``distill_loss=spec``, in its order.

    Raises:
        ConfigurationError: naming every term that is none, or that stands there twice, and two temperatures.
    """
    terms: list[Term] = []
    problems = []
    for text in re.split(r"\+(?![^(]*\))", spec):
        try:
            terms.append(_term(re.sub(r"\s", "", text)))
        except ValueError as error:
            problems.append(f"distill_loss must be a sum like kl:tau=2*0.7 + ce*0.3, got {text.strip()!r}: {error}")
    labels = [term.label for term in terms]
    problems += [f"distill_loss must have each term once, got {label!r} twice" for label in _twice(labels)]
    temperatures = sorted({term.options["tau"] for term in terms if term.needs == "logits"})
    if len(temperatures) > 1:
        given = " and ".join(f"{tau:g}" for tau in temperatures)
        problems.append(f"distill_loss must have one temperature (a teacher answers at one), got {given}")
    if problems:
        raise ConfigurationError(problems)
    return tuple(terms)


def _twice(labels: list[str]) -> list[str]:
    return sorted({label for label in labels if labels.count(label) > 1})


def _term(text: str) -> Term:
    """A term without blanks; the error is the end of a sentence."""
    body, star, weight = text.partition("*")
    name, colon, rest = body.partition(":")
    if name not in LOSSES:
        allowed = ", ".join(loss.grammar for loss in LOSSES.values())
        near = difflib.get_close_matches(name.lower(), LOSSES, n=1)
        raise ValueError(f"a term must be one of {allowed}" + (f"; did you mean {near[0]!r}?" if near else ""))
    loss, given = LOSSES[name], rest.split(",") if colon else []
    layers = _pairs(given.pop(0) if given else "", loss.grammar) if loss.layered else ()
    options = dict(loss.options)
    for option in given:
        key, _, value = option.partition("=")
        if key not in loss.options or not _NUMBER.fullmatch(value):
            raise ValueError(f"it must be {loss.grammar}")
        words, within = _RANGES[key]
        if not within(float(value)):
            raise ValueError(f"{key} must be {words}")
        options[key] = float(value)
    return Term(name, options, layers, Weight.parse(weight) if star else Weight())


def _pairs(text: str, grammar: str) -> tuple[tuple[int, int], ...]:
    matches = [_PAIR.fullmatch(pair) for pair in text.split("/")]
    if not all(matches):
        raise ValueError(f"it must be {grammar}")
    return tuple((int(match[1]), int(match[2])) for match in matches if match)
