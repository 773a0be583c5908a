"""Bounded waiting: nothing in a link waits without one of these."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Deadline"]


class Deadline:
    """A moment that moves away each time something is heard.

    Args:
        timeout_s: seconds of silence after which the deadline has passed.
        clock: seconds, monotonic (a test's own clock, otherwise the system's).
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._at = clock() + timeout_s

    def renew(self) -> None:
        """Something was heard: start again."""
        self._at = self._clock() + self.timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - self._clock())

    def passed(self) -> bool:
        """Whether the silence has lasted ``timeout_s``."""
        return self._clock() >= self._at
