"""sync_every: fixed, growing, balanced."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.strategy.pace import Pace


@pytest.mark.parametrize(
    ("text", "pace"),
    [
        (30, Pace(30, 30)),
        ("1", Pace(1, 1)),
        (" 12 ", Pace(12, 12)),
        ("5..30", Pace(5, 30)),
        ("auto-balance", Pace(30, 30, True)),
        ("auto-balance:8", Pace(8, 8, True)),
        ("auto-balance:2..8", Pace(2, 8, True)),
    ],
)
def test_what_can_be_written(text: str | int, pace: Pace) -> None:
    assert Pace.parse(text) == pace


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "3.5",
        "30..5",
        "0..5",
        "5..",
        "..5",
        "auto-balance:",
        "auto-balance:0",
        "auto",
        "auto-balance30",
        "٣",
        "1000000000",
        "1..1000000000",
        "9" * 5000,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number of steps \(30\), a growing one"):
        Pace.parse(text)


def test_it_grows_geometrically() -> None:
    pace = Pace(2, 32)
    assert [pace.steps(step, 100) for step in (0, 25, 50, 75, 100, 150)] == [2, 4, 8, 16, 32, 32]
    assert Pace(7, 7).steps(3, 100) == 7
    assert pace.steps(3, 0) == 32  # no end in sight


def test_a_slower_cluster_takes_fewer_steps() -> None:
    pace = Pace(30, 30, True)
    assert pace.balanced(30, 0.1, 0.1) == 30
    assert pace.balanced(30, 0.3, 0.1) == 10
    assert pace.balanced(30, 100.0, 0.1) == 1
    assert pace.balanced(30, 0.0, 0.1) == 30  # not known yet
    assert Pace(30, 30).balanced(30, 0.3, 0.1) == 30
