"""What each member says of itself in a reunion."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.strategy.history import Entry, parse_entries

__all__ = ["Introduction"]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a member says of itself in a reunion.

    Attributes:
        step: optimizer steps that it has taken, at most all that are planned: everybody goes on from the furthest one's.
        turns: rounds that it has merged.
        fields: what must be equal on all clusters, see `handshake.compare`.
        work: samples or tokens that it has trained on so far.
        history: the rounds that it remembers.
        diverged: what it brings is known to be wrong.
    """

    step: int
    turns: int
    fields: Mapping[str, Any]
    work: float
    history: list[Entry]
    diverged: bool

    def note(self) -> dict[str, Any]:
        """What `parse` reads (JSON)."""
        return {
            "step": self.step,
            "turns": self.turns,
            "fields": dict(self.fields),
            "work": self.work,
            "history": self.history,
            "diverged": self.diverged,
        }

    @classmethod
    def parse(cls, note: Mapping[str, Any], sender: str) -> Introduction:
        """A member's note.

        Args:
            note: as received.
            sender: for errors.

        Raises:
            ProtocolError: it is none.
        """
        step, turns, fields, work = (note.get(name) for name in ("step", "turns", "fields", "work"))
        if not (_is_count(step) and _is_count(turns) and isinstance(fields, dict)):
            raise ProtocolError(f"{sender} must say where it stands, got {note!r:.80}")
        planned = fields.get("max_steps")
        if isinstance(planned, int) and step > planned:
            raise ProtocolError(f"{sender} must stand at a step of {planned} (max_steps) at most, got {step}")
        if not (isinstance(work, int | float) and 0 <= work <= sys.float_info.max):
            raise ProtocolError(f"{sender} must say what it has done, got {note!r:.80}")
        history = parse_entries(note.get("history"), sender)
        return cls(step, turns, fields, float(work), history, note.get("diverged") is True)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 1 << 53
