"""What is remembered of past rounds, against a plain list of everything that has happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.strategy.history import Entry, History, last_common, parse_entries, since

BOTH = ("amber", "birch")


def history_of(rounds: int, *, first: int = 1, prefix: str = "d", members: tuple[str, ...] = BOTH) -> History:
    """Ten samples before each round."""
    history = History()
    for number in range(first, first + rounds):
        history.work += 10
        history.note(number, f"{prefix}{number}", members)
    return history


def test_the_last_64_rounds_are_remembered() -> None:
    history = history_of(100)
    assert history.entries() == [Entry(number, f"d{number}", 10.0 * number) for number in range(37, 101)]


def test_the_last_round_with_somebody_who_was_lost_is_remembered_much_longer() -> None:
    history = history_of(5, members=("amber", "birch", "cedar"))
    for number in range(6, 500):
        history.note(number, f"d{number}", ("amber", "birch") if number < 300 else ("amber",))
    numbers = [entry.number for entry in history.entries()]
    assert numbers == [5, 299, *range(436, 500)]


def test_who_comes_back_pins_nothing() -> None:
    history = history_of(3, members=("amber",))
    for number in range(4, 100):
        history.note(number, f"d{number}", BOTH)
    assert [entry.number for entry in history.entries()] == list(range(36, 100))


def test_who_comes_and_goes_again_does_not_fill_the_memory() -> None:
    history = History()
    for number in range(1, 1001):
        history.note(number, f"d{number}", BOTH if number % 2 else ("amber",))
    entries = history.entries()
    assert len(entries) <= 128
    assert parse_entries(json.loads(json.dumps(entries)), "x") == entries


@pytest.mark.parametrize("number", [0, 3, 7])
def test_what_followed_the_parting_is_forgotten(number: int) -> None:
    history = history_of(7)
    history.forget_after(number)
    assert [entry.number for entry in history.entries()] == list(range(1, number + 1))
    assert history.work == 70  # which has been done, whatever became of it


def test_without_a_common_round_everything_is_forgotten() -> None:
    history = history_of(7)
    history.forget_after(None)
    assert history.entries() == []


def test_pinned_rounds_are_forgotten_too() -> None:
    history = history_of(5)
    history.note(6, "d6", ("amber",))
    history.forget_after(4)
    assert [entry.number for entry in history.entries()] == [1, 2, 3, 4]


def test_a_checkpoint_holds_all_of_it() -> None:
    history = history_of(5)
    for number in range(6, 90):
        history.note(number, f"d{number}", ("amber",))
    restored = History()
    restored.note(1, "something else", BOTH)
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.entries() == history.entries()
    assert restored.work == history.work
    restored.note(90, "d90", ("amber",))
    assert [entry.number for entry in restored.entries()] == [5, *range(27, 91)]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"work": "much", "recent": [], "pinned": []},
        {"work": None, "recent": [], "pinned": []},
        {"work": 10**400, "recent": [], "pinned": []},
        {"work": 1.0, "recent": [[1]], "pinned": []},
        {"work": 1.0, "recent": []},
    ],
)
def test_a_checkpoint_that_holds_something_else(state: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the checkpoint"):
        History().restore(state)


# Entries


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "abc",
        [1],
        [[1, "d"]],
        [[1, "d", 2.0, 3]],
        [["x", "d", 2.0]],
        [[1, "d", "much"]],
        [[1, "d", None]],
        [[float("inf"), "d", 1.0]],
        [[float("nan"), "d", 1.0]],
        [[1, "d", 10**400]],
        [[1, "d", float("inf")]],
        [[1, "d", float("nan")]],
        [[1, "d", -1.0]],
        [[number, "d", 1.0] for number in range(129)],
    ],
)
def test_what_is_no_list_of_rounds(value: Any) -> None:
    with pytest.raises(ProtocolError, match="somebody"):
        parse_entries(value, "somebody")


def test_entries_are_put_in_order() -> None:
    assert parse_entries([[3, "c", 30], [1, "a", 10.5]], "x") == [Entry(1, "a", 10.5), Entry(3, "c", 30.0)]


# What two of them have in common

rounds = st.lists(st.tuples(st.integers(1, 12), st.sampled_from("ab"), st.floats(0, 100)), max_size=12)


@given(rounds, rounds)
def test_the_last_common_round(one: list[tuple[int, str, float]], other: list[tuple[int, str, float]]) -> None:
    ours, theirs = parse_entries(one, "x"), parse_entries(other, "y")
    expected = None
    for number, digest, _ in one:
        for their_number, their_digest, _ in other:
            if (number, digest) == (their_number, their_digest):
                expected = number if expected is None else max(expected, number)
    assert last_common(ours, theirs) == last_common(theirs, ours) == expected


def test_an_equal_number_is_not_an_equal_round() -> None:
    both = history_of(3)
    ours = [*both.entries(), Entry(4, "ours", 40.0), Entry(5, "ours", 50.0)]
    theirs = [*both.entries(), Entry(4, "theirs", 30.0)]
    assert last_common(ours, theirs) == 3
    assert last_common(ours, theirs[3:]) is None
    assert last_common(ours, []) is None


def test_how_much_was_done_since() -> None:
    entries = history_of(5).entries()
    assert since(entries, 73.0, 5) == 23.0
    assert since(entries, 73.0, 2) == 53.0
    assert since(entries, 73.0, 1000) == 23.0


def test_who_joined_later_has_worked_since_it_joined() -> None:
    late = History()
    late.work = 1000.0  # before it was dropped
    late.note(8, "d8", BOTH)
    late.work += 30
    late.note(9, "d9", BOTH)
    assert since(late.entries(), late.work, 3) == 30.0
    assert since([], 1000.0, 3) == 0.0


def test_nobody_has_done_less_than_nothing() -> None:
    assert since([Entry(1, "d", 50.0)], 20.0, 1) == 0.0  # a checkpoint whose counter was reset, say


@pytest.mark.parametrize("members", [BOTH, ("amber",)])
def test_a_loss_right_after_a_resume(members: tuple[str, ...]) -> None:
    """A checkpoint does not say who was there."""
    history = History()
    history.restore(json.loads(json.dumps(history_of(5).state())))
    for number in range(6, 200):
        history.note(number, f"d{number}", members)
    assert [entry.number for entry in history.entries()] == [5, *range(136, 200)]


def test_the_round_of_a_checkpoint_is_remembered_as_long_as_its_clusters_may_start_from_it() -> None:
    history = history_of(10)
    saved = history_of(10)
    history.pin()
    history.pin()
    for number in range(11, 300):
        history.note(number, f"d{number}", BOTH)
    assert [entry.number for entry in history.entries()] == [10, *range(236, 300)]
    assert last_common(history.entries(), saved.entries()) == 10
