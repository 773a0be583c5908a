"""The links' rate: never more than the line's, whatever the rhythm of training."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paddlenlp_nebula.link.throughput import Throughput
from paddlenlp_nebula.transport.channel import Channel


class Sent:
    """What a channel says of its sending."""

    def __init__(self, delivered: int, seconds: float) -> None:
        self.bytes_delivered, self.seconds_sending = delivered, seconds


def look(throughput: Throughput, **channels: Sent) -> None:
    throughput.look(cast("dict[str, Channel]", cast("Any", channels)))


def test_the_best_look_counts_and_the_slowest_peer() -> None:
    throughput = Throughput()
    look(throughput, birch=Sent(0, 0.0), cedar=Sent(0, 0.0))
    assert throughput.mbit_s is None
    look(throughput, birch=Sent(1_000_000, 1.0), cedar=Sent(10_000_000, 1.0))
    assert throughput.mbit_s == pytest.approx(8.0)
    look(throughput, birch=Sent(3_000_000, 2.0), cedar=Sent(10_000_000, 1.0))
    assert throughput.mbit_s == pytest.approx(16.0)
    look(throughput, birch=Sent(3_000_100, 3.0))  # a few bytes, a whole round trip
    assert throughput.mbit_s == pytest.approx(16.0)


def test_without_a_clock_there_is_no_rate() -> None:
    throughput = Throughput()
    look(throughput, birch=Sent(5_000_000, 0.0))
    assert throughput.mbit_s is None
