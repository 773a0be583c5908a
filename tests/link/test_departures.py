"""Departures: the best reason wins, and what is in flight is waited for a moment."""

from __future__ import annotations

from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.departures import Departures


class Known(Departures):
    """Departures by a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: Deadline(0.5, clock=lambda: self.now))


def test_what_the_channel_says_is_final_at_once() -> None:
    known = Known()
    assert "b" not in known
    assert known.final("b") is None
    known.ended("b", "its courier ended")
    assert str(known.final("b")) == "cluster 'b' is gone: its courier ended"
    known.ended("b", "something later")
    known.reported("b", "its connection closed")
    assert known["b"].reason == "its courier ended"
    assert list(known) == ["b"]


def test_the_door_leaves_the_channel_half_a_second() -> None:
    known = Known()
    known.reported("b", "its connection closed")
    assert "b" in known
    assert known.final("b") is None
    known.now = 0.5
    assert known.final("b") is not None


def test_the_end_of_the_channel_cuts_the_wait_short() -> None:
    known = Known()
    known.reported("b", "its connection closed")
    known.ended("b", "the other side has closed it")
    assert str(known.final("b")) == "cluster 'b' is gone: its connection closed"


def test_own_words_replace_what_was_observed() -> None:
    known = Known()
    known.reported("b", "its connection closed")
    known.said_goodbye("b", "its training is complete", deliberate=True)
    known.said_goodbye("b", "something later", deliberate=False)
    lost = known.final("b")
    assert lost is not None
    assert (lost.reason, lost.deliberate) == ("its training is complete", True)


def test_a_goodbye_at_the_door_overtakes_the_channel() -> None:
    known = Known()
    known.said_goodbye("b", "it failed", deliberate=False, at_the_door=True)
    assert known["b"].reason == "it failed"
    assert known.final("b") is None
    known.said_goodbye("b", "it failed", deliberate=False)
    assert known.final("b") is not None
