"""How far ahead a student asks, against a simulated pair whose times are known."""

from __future__ import annotations

from collections import deque

import pytest

from paddlenlp_nebula.distill.depth import Depth


def simulate(step: float, teacher: float, rtt: float, most: int = 64, batches: int = 300) -> tuple[Depth, float]:
    """A student, a line and a teacher that answers one question after another; returns the share of time waited."""
    pace, now, free, waited_late, late_from = Depth(most), 0.0, 0.0, 0.0, 0.0
    asked: deque[tuple[float, float]] = deque()
    for number in range(batches):
        while len(asked) < pace.depth:
            begins = max(free, now + rtt / 2)
            free = begins + teacher
            asked.append((now, free + rtt / 2))
        at, due = asked.popleft()
        waited = max(0.0, due - now)
        now += waited
        queued = sum(1 for _, later in asked if later > due) if teacher > step else 0
        pace.answered(due - at, teacher, queued)
        pace.stepped(step, waited)
        now += step
        if number == batches // 2:
            late_from, waited_late = now, 0.0
        waited_late += waited
    return pace, waited_late / (now - late_from)


@pytest.mark.parametrize(
    ("step", "teacher", "rtt", "depth"),
    [
        (0.1, 0.01, 0.05, 2),  # what is asked at one step's begin is there before its end
        (0.1, 0.01, 0.35, 5),
        (0.02, 0.01, 0.3, 17),
        (0.1, 0.09, 0.05, 3),
    ],
)
def test_a_student_that_is_the_slower_side_does_not_wait(step: float, teacher: float, rtt: float, depth: int) -> None:
    pace, waited = simulate(step, teacher, rtt)
    assert waited == pytest.approx(0, abs=1e-3)
    assert pace.limits == "student"
    assert depth <= pace.depth <= depth + 2


def test_a_slow_teacher_is_kept_busy_and_no_more() -> None:
    pace, waited = simulate(step=0.02, teacher=0.1, rtt=0.05)
    assert waited == pytest.approx(0.8, abs=0.01)  # the teacher's 0.1 s for a batch, of which 0.02 are the student's
    assert pace.limits == "teacher"
    assert pace.slowdown == pytest.approx(5, rel=0.05)
    assert pace.depth <= 5


def test_too_little_memory_for_the_line_makes_the_link_the_limit() -> None:
    pace, waited = simulate(step=0.02, teacher=0.01, rtt=0.3, most=4)
    assert waited > 0.5
    assert pace.depth == 4
    assert pace.limits == "link"


def test_many_students_saturate_a_fast_teacher() -> None:
    pace = Depth(64)
    for _ in range(20):
        pace.answered(0.5, 0.01, waiting=12)
        pace.stepped(0.02, 0.1)
    assert pace.limits == "teacher"


def test_before_anything_is_known_it_asks_a_little_ahead() -> None:
    assert Depth(64).depth == 2
    assert Depth(1).depth == 1
    assert Depth(64).slowdown == 1


def test_a_rare_delay_is_provided_for_and_forgotten() -> None:
    pace = Depth(64)
    for latency in [0.1] * 5 + [1.0]:
        pace.answered(latency, 0.01, 0)
        pace.stepped(0.1, 0.0)
    assert pace.depth == 11
    for _ in range(16):
        pace.answered(0.1, 0.01, 0)
    assert pace.depth == 2
