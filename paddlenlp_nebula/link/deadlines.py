"""Bounded waiting: nothing in a link waits without one of these."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

__all__ = ["Backoff", "Deadline", "Reminder"]


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


class Backoff:
    """Tries that fail grow rarer, those with each peer by themselves.

    Args:
        clock: as for `Deadline`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pauses: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def failed(self, peer: str, first_s: float, longest_s: float, factor: float = 2.0, spread: float = 0.0) -> None:
        """A try has failed: the next one is due after a pause.

        Args:
            peer: with whom.
            first_s, longest_s: the shortest and the longest pause, seconds.
            factor: by which pauses grow.
            spread: they vary at random by up to this share, so that many do not try at the same moment.
        """
        pause_s = min(longest_s, max(first_s, factor * self._pauses.get(peer, 0.0)))
        self._pauses[peer] = pause_s
        self._not_before[peer] = self._clock() + pause_s * random.uniform(1 - spread, 1 + spread)

    def due(self, peer: str) -> bool:
        """Whether the next try may be made."""
        return self._clock() >= self._not_before.get(peer, 0.0)

    def pauses_s(self) -> dict[str, float]:
        """Peer -> the last pause, of those whose last try has failed."""
        return dict(self._pauses)

    def relax(self, peer: str) -> None:
        """It has succeeded: pauses begin anew."""
        self._pauses.pop(peer, None)

    def forget(self, peer: str) -> None:
        """It is as if it had never been tried: the next try is due at once."""
        self._pauses.pop(peer, None)
        self._not_before.pop(peer, None)
