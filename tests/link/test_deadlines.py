"""Deadlines, by a clock of the test's own."""

from __future__ import annotations

from paddlenlp_nebula.link.deadlines import Deadline


def test_a_deadline_moves_away_when_something_is_heard() -> None:
    now = 100.0
    deadline = Deadline(5.0, clock=lambda: now)
    assert deadline.remaining_s() == 5.0
    now = 104.0
    assert deadline.remaining_s() == 1.0
    assert not deadline.passed()
    deadline.renew()
    now = 108.9
    assert not deadline.passed()
    now = 109.0
    assert deadline.passed()
    now = 200.0
    assert deadline.remaining_s() == 0.0
