"""How many batches ahead a student asks, and who keeps whom waiting.

By Little's law (Little 1961, "A proof for the queuing formula L = lambda W") as many questions are under way as arrive in
the time that one takes: latency / interval. The latency is the line's round trip, the transfer and the teacher's time;
the interval is that of the slower of the two sides.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Depth"]

_RECENT = 16  # batches; a rare delay is forgotten after so many
_SMOOTH = 0.2  # weight of the latest batch in the means
_FIRST = 2
_IDLE_SHARE = 0.02  # of its time, below which a student does not really wait


class Depth:
    """Follows the measured times; pure arithmetic.

    Args:
        most: questions and answers held at once, at most.

    Attributes:
        step_s: the student's own time between two batches, seconds, a moving mean; None before the first.
        teacher_s: the teacher's for an answer, likewise.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.step_s: float | None = None
        self.teacher_s: float | None = None
        self._waited_s = 0.0
        self._queued = 0.0
        self._shortest = math.inf
        self._latencies: deque[float] = deque(maxlen=_RECENT)

    @property
    def depth(self) -> int:
        """Batches to ask for ahead, the next one included: at least 1."""
        if self.step_s is None or self.teacher_s is None or not self._latencies:
            return min(_FIRST, self.most)
        # Where the teacher is saturated the questions wait for each other, and more of them would only wait longer.
        latency = self._shortest if self._saturated else max(self._latencies)
        interval = max(self.step_s, self.teacher_s, 1e-9)
        return max(1, min(self.most, math.ceil(latency / interval) + 1))

    def answered(self, latency_s: float, teacher_s: float, waiting: int) -> None:
        """An answer has come.

        Args:
            latency_s: since it was asked for.
            teacher_s: that the teacher took for it.
            waiting: questions that waited at the teacher when it began, of all students whose answers get through.
        """
        self._latencies.append(latency_s)
        self._shortest = min(self._shortest, latency_s)
        self.teacher_s = _mean(self.teacher_s, teacher_s)
        self._queued = _mean(self._queued, float(waiting))

    def stepped(self, own_s: float, waited_s: float) -> None:
        """The student has come for the next batch: its own time since the last one, and how long it waited then."""
        self.step_s = _mean(self.step_s, own_s)
        self._waited_s = _mean(self._waited_s, waited_s)

    @property
    def limits(self) -> str:
        """Who is the slower side, lately: "student", "teacher" (with all its students), or "link"."""
        if self._waited_s <= _IDLE_SHARE * ((self.step_s or 0.0) + self._waited_s):
            return "student"
        return "teacher" if self._saturated else "link"

    @property
    def slowdown(self) -> float:
        """Time for a batch relative to what the student alone would take, at least 1."""
        return 1.0 + self._waited_s / self.step_s if self.step_s else 1.0

    @property
    def _saturated(self) -> bool:
        """Whether the teacher has as much to do as it can, for this student or for all together."""
        return (self.teacher_s or 0.0) >= (self.step_s or 0.0) or self._queued >= 1


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTH * (value - before)
