"""How long a silence is borne, with a clock of our own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.link.pulse import BEAT_S, Pulse


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pulse_of(timeout_s: float = 60.0) -> tuple[Pulse, Clock]:
    clock = Clock()
    return Pulse(timeout_s, clock), clock


def beat(pulse: Pulse, clock: Clock, *gaps: float) -> None:
    for gap in gaps:
        clock.now += gap
        pulse.heard()


def test_a_new_line_has_the_whole_timeout() -> None:
    pulse, clock = pulse_of()
    clock.now += 60.0
    assert (pulse.silent_s, pulse.limit_s, pulse.stopped()) == (60.0, 60.0, False)
    clock.now += 0.01
    assert pulse.stopped()


def test_nothing_is_concluded_from_a_few_beats() -> None:
    pulse, clock = pulse_of()
    beat(pulse, clock, *[BEAT_S] * 59)
    assert pulse.limit_s == 60.0
    beat(pulse, clock, BEAT_S)
    assert pulse.limit_s == 5.0


def test_five_seconds_on_a_good_line() -> None:
    pulse, clock = pulse_of()
    beat(pulse, clock, *[BEAT_S] * 200)
    clock.now += 5.0
    assert not pulse.stopped()
    clock.now += 0.01
    assert pulse.stopped()


def test_four_times_the_longest_silence_on_a_bad_one() -> None:
    pulse, clock = pulse_of()
    beat(pulse, clock, *[BEAT_S] * 60, 4.0)
    assert pulse.limit_s == 16.0
    clock.now += 15.9
    assert not pulse.stopped()


def test_never_longer_than_the_timeout() -> None:
    pulse, clock = pulse_of(8.0)
    beat(pulse, clock, *[BEAT_S] * 60, 7.0)
    assert pulse.limit_s == 8.0
    short, clock = pulse_of(2.0)
    beat(short, clock, *[BEAT_S] * 100)
    assert short.limit_s == 2.0


def test_a_silence_is_forgotten_within_the_hour() -> None:
    pulse, clock = pulse_of()
    beat(pulse, clock, *[BEAT_S] * 60, 12.0)
    after = {0: 48.0}
    for minute in (10, 60):
        beat(pulse, clock, *[BEAT_S] * int((minute - max(after)) * 60 / BEAT_S))
        after[minute] = pulse.limit_s
    assert 48.0 > after[10] > after[60] == 5.0


def test_hearing_again_ends_the_silence() -> None:
    pulse, clock = pulse_of(3.0)
    clock.now += 4.0
    assert pulse.stopped()
    pulse.heard()
    assert not pulse.stopped()
    assert pulse.silent_s == 0.0


@given(st.lists(st.floats(0, 100), max_size=200), st.floats(0.1, 120))
def test_the_limit_lies_where_it_should(gaps: list[float], timeout_s: float) -> None:
    pulse, clock = pulse_of(timeout_s)
    beat(pulse, clock, *gaps)
    assert min(5.0, timeout_s) <= pulse.limit_s <= timeout_s
    longest = max(gaps, default=0.0)
    if len(gaps) >= 60:
        assert pulse.limit_s >= min(timeout_s, 4 * longest * 0.999 ** len(gaps) - 1e-6)
        assert pulse.limit_s <= max(5.0, 4 * longest + 1e-6)
    else:
        assert pulse.limit_s == timeout_s
