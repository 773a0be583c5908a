"""How much a loss weighs, and how that changes in the course of training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SCHEDULES", "Weight"]


def _constant(progress: float, value: float) -> float:
    return value


def _linear(progress: float, first: float, last: float) -> float:
    return first + (last - first) * progress


def _cosine(progress: float, first: float, last: float) -> float:
    return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _warmup(progress: float, value: float, share: float) -> float:
    return value * min(1.0, progress / share) if share else value


SCHEDULES: dict[str, tuple[str, Callable[..., float]]] = {
    "constant": ("constant(W)", _constant),
    "linear": ("linear(FIRST,LAST)", _linear),
    "cosine": ("cosine(FIRST,LAST)", _cosine),
    "warmup": ("warmup(W,SHARE)", _warmup),
}
"""Name -> how it is written, and the weight as a function of progress and the numbers in brackets."""

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
GRAMMAR = "W or " + ", ".join(grammar for grammar, _ in SCHEDULES.values())


@dataclass(frozen=True)
class Weight:
    """A weight that depends on progress.

    Attributes:
        schedule: a name in `SCHEDULES`. ``linear`` and ``cosine`` go from the first number to the last in the course of
            training; ``warmup`` rises from 0 in the given share of it, and stays.
        numbers: what stands in its brackets, each 0 or more.
    """

    schedule: str = "constant"
    numbers: tuple[float, ...] = (1.0,)

    @classmethod
    def parse(cls, text: str) -> Weight:
        """From ``0.7`` or ``cosine(1,0.1)``.

        Raises:
            ValueError: saying, as the end of a sentence, what it must be.
        """
        if re.fullmatch(_NUMBER, text):
            return cls("constant", (float(text),))
        match = re.fullmatch(rf"(\w+)\(((?:{_NUMBER})(?:,(?:{_NUMBER}))*)\)", text)
        if match is None or match[1] not in SCHEDULES:
            raise ValueError(f"a weight must be {GRAMMAR}, got {text!r}")
        numbers = tuple(map(float, match[2].split(",")))
        grammar, _ = SCHEDULES[match[1]]
        if len(numbers) != grammar.count(",") + 1 or (match[1] == "warmup" and numbers[1] > 1.0):
            raise ValueError(f"a weight must be {grammar}, SHARE at most 1, got {text!r}")
        return cls(match[1], numbers)

    def at(self, progress: float) -> float:
        """The weight when this share of the training is done, from 0 to 1."""
        return SCHEDULES[self.schedule][1](min(max(progress, 0.0), 1.0), *self.numbers)

    def __str__(self) -> str:
        numbers = ",".join(f"{number:g}" for number in self.numbers)
        return numbers if self.schedule == "constant" else f"{self.schedule}({numbers})"
