"""Deadlines, by a clock of the test's own."""

from __future__ import annotations

from paddlenlp_nebula.link.deadlines import Backoff, Deadline, Reminder


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


def test_tries_grow_rarer_with_each_peer_by_itself() -> None:
    now = [0.0]
    backoff = Backoff(lambda: now[0])
    for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
        backoff.failed("east", 1.0, 5.0)
        assert backoff.pauses_s() == {"east": pause}
        assert not backoff.due("east")
        assert backoff.due("south")
        now[0] += pause
        assert backoff.due("east")


def test_success_begins_anew_and_forgetting_waits_for_nothing() -> None:
    backoff = Backoff(lambda: 0.0)
    for _ in range(3):
        backoff.failed("east", 1.0, 60.0)
    backoff.relax("east")
    assert backoff.pauses_s() == {}
    assert not backoff.due("east")  # what has been put off stays so
    backoff.failed("east", 1.0, 60.0)
    assert backoff.pauses_s() == {"east": 1.0}
    backoff.forget("east")
    assert backoff.due("east")


def test_pauses_are_spread() -> None:
    now = [0.0]
    backoff = Backoff(lambda: now[0])
    due = []
    for number in range(200):
        backoff.failed(f"c{number}", 10.0, 60.0, spread=0.3)
    for now[0] in (6.9, 10.0, 13.1):
        due.append(sum(backoff.due(f"c{number}") for number in range(200)))
    assert due[0] == 0
    assert 50 < due[1] < 150
    assert due[2] == 200
