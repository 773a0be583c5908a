"""Deadlines, by a clock of the test's own."""

from __future__ import annotations

from paddlenlp_nebula.link.deadlines import Deadline, Reminder


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


def test_a_long_wait_is_spoken_of_now_and_then() -> None:
    now = 0.0
    said: list[str] = []
    reminder = Reminder(said.append, every_s=60.0, clock=lambda: now)
    for now in (0.0, 9.9, 10.0, 11.0, 69.9, 70.0, 130.0):
        reminder.say(f"{now:g}")
    assert said == ["10", "70", "130"]
