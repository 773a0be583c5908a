"""Bounded waiting: nothing in a link waits without one of these."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Deadline", "Reminder"]


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


class Reminder:
    """Says now and then that a wait goes on, so that it does not look like a hang.

    Args:
        say: takes a sentence.
        every_s: seconds between two of them; the first comes after a sixth of that.
        clock: as for `Deadline`.
    """

    def __init__(
        self, say: Callable[[str], None], every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._due = clock() + every_s / 6

    def say(self, sentence: str) -> None:
        """Say it if it is time."""
        if self._clock() >= self._due:
            self._due = self._clock() + self._every_s
            self._say(sentence)
