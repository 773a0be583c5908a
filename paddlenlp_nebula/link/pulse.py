"""How long a line may be silent before its other end counts as lost."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["BEAT_S", "Pulse"]

BEAT_S = 0.5
"""Seconds between two signs of life."""

_LEAST_S = 5.0  # ten beats: what a loss costs, and a return, is not to be paid for a hiccup
_FACTOR = 4.0  # as patient as four times the longest silence so far
_FADING = 0.999  # per beat, so that a silence is forgotten within the hour
_ENOUGH = 60  # gaps, before anything is concluded from them


class Pulse:
    """Learns from the gaps between signs of life how long a silence means nothing.

    A sign is sent every `BEAT_S` by a thread, so gaps are long only where the line is bad, the machine is
    overloaded or an extension keeps Python's lock; all of that shows in the gaps before (the idea, if not the
    statistics, of the phi accrual failure detector, Hayashibara et al. 2004).

    Args:
        timeout_s: longest silence in any case, and as long as little is known.
        clock: seconds, monotonic (a test's own clock, otherwise the system's).
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last = clock()
        self._longest_s = 0.0
        self._gaps = 0

    def heard(self) -> None:
        """Something has come."""
        gap, self._last = self.silent_s, self._clock()
        self._longest_s = max(gap, _FADING * self._longest_s)
        self._gaps += 1

    @property
    def silent_s(self) -> float:
        """Seconds since anything came."""
        return self._clock() - self._last

    @property
    def limit_s(self) -> float:
        """The longest silence that means nothing, seconds."""
        if self._gaps < _ENOUGH:
            return self._timeout_s
        return min(self._timeout_s, max(_LEAST_S, _FACTOR * self._longest_s))

    def stopped(self) -> bool:
        """Whether the silence has lasted too long."""
        return self.silent_s > self.limit_s
