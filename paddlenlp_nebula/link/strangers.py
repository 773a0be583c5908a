"""Strangers: connections to the door that have not proved who they are. They must cost little, and keep nobody out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from paddlenlp_nebula.link.line import Line

__all__ = ["MAX_STRANGERS", "Refusals", "overdue", "to_make_room"]

MAX_STRANGERS = 64
"""Connections that have not knocked yet."""

_STRANGER_S = 5.0  # within which a stranger must have knocked


def overdue(lines: Sequence[Line]) -> list[Line]:
    """The strangers that should have knocked by now."""
    latest = time.monotonic() - _STRANGER_S
    return [line for line in lines if line.cluster is None and line.since <= latest]


def to_make_room(lines: Sequence[Line]) -> Line | None:
    """If there are too many strangers: the one to go, the oldest from the address that has sent most of them.

    Whoever opens connections without end so throws out its own.
    """
    strangers = [line for line in lines if line.cluster is None]
    if len(strangers) <= MAX_STRANGERS:
        return None
    crowds = Counter(line.address for line in strangers)
    return max(strangers, key=lambda line: (crowds[line.address], -line.since))


class Refusals:
    """Who was turned away, by category: as many as there may be, they fill neither log nor memory.

    Attributes:
        counts: category -> how often.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, category: str) -> bool:
        """Count one; whether it is worth a line in the log: the 1st, 10th, 100th... of its category."""
        self.counts[category] += 1
        return str(self.counts[category]).rstrip("0") == "1"
