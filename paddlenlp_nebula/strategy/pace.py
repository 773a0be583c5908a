"""How many optimizer steps lie between two rounds: ``sync_every``."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Pace"]

_TEXT = re.compile(r"(?P<balance>auto-balance:?)?(?:(?P<first>[0-9]{1,9})\.\.)?(?P<last>[0-9]{1,9})?")
_DEFAULT = 30  # H in DiLoCo's descendants that use sparse exchange (arXiv 2508.15706)


@dataclass(frozen=True, slots=True)
class Pace:
    """H, the optimizer steps per round.

    Attributes:
        first, last: H at the beginning and at the end of training; between them it grows
            geometrically with the steps done (our choice: early changes are large and soon stale).
        balance: a slower cluster takes fewer steps per round than the fastest, so that nobody waits.
    """

    first: int = _DEFAULT
    last: int = _DEFAULT
    balance: bool = False

    @classmethod
    def parse(cls, text: str | int) -> Pace:
        """``30``, ``5..30`` (growing), ``auto-balance`` or ``auto-balance:30`` (of the fastest cluster).

        Raises:
            ValueError: it is none of these, or an H is below 1 or has more than 9 digits.
        """
        match = _TEXT.fullmatch(str(text).strip())
        shape = (
            "a number of steps (30), a growing one (5..30), 'auto-balance' or 'auto-balance:30', of at most 9 digits"
        )
        if match is None or not match[0] or match[0].endswith(":") or (match["first"] and not match["last"]):
            raise ValueError(f"must be {shape}, got {text!r}")
        if match["balance"] and match["last"] and not match["balance"].endswith(":"):
            raise ValueError(f"must be {shape}, got {text!r}")
        last = int(match["last"] or _DEFAULT)
        first = int(match["first"] or last)
        if not 1 <= first <= last:
            raise ValueError(f"must be {shape} with 1 <= first <= last, got {text!r}")
        return cls(first, last, bool(match["balance"]))

    def steps(self, step: int, max_steps: int) -> int:
        """H for the round that begins after ``step`` of ``max_steps`` optimizer steps."""
        done = min(1.0, step / max_steps) if max_steps > 0 else 1.0
        growth: float = (self.last / self.first) ** done
        return round(self.first * growth)

    def balanced(self, steps: int, own_step_s: float, fastest_step_s: float) -> int:
        """The steps of a cluster that needs ``own_step_s`` for each, while the fastest takes ``steps``."""
        if not self.balance or own_step_s <= 0 or fastest_step_s <= 0:
            return steps
        return max(1, round(steps * fastest_step_s / own_step_s))
