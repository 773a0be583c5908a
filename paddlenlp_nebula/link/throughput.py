"""The rate at which the links carry what they are given, from the couriers' clocks."""

from __future__ import annotations

from collections.abc import Mapping

from paddlenlp_nebula.transport.channel import Channel

__all__ = ["Throughput"]


class Throughput:
    """The best rate of the way out to each peer.

    A chunk counts as on its way until the peer's MPI has taken it, so the rate is never above the line's. It is below
    where the peer reads late or where the chunks are few (then it is the round trip that is measured): hence the best
    of all looks.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}
        self._best: dict[str, float] = {}

    def look(self, channels: Mapping[str, Channel]) -> None:
        """Take in what has been delivered since the last call."""
        for peer, channel in channels.items():
            delivered, seconds = self._before.get(peer, (0, 0.0))
            self._before[peer] = (channel.bytes_delivered, channel.seconds_sending)
            if channel.seconds_sending > seconds:
                rate = 8e-6 * (channel.bytes_delivered - delivered) / (channel.seconds_sending - seconds)
                self._best[peer] = max(rate, self._best.get(peer, 0.0))

    @property
    def mbit_s(self) -> float | None:
        """The rate to the slowest peer, Mbit/s; None while nothing has been measured."""
        return min(self._best.values(), default=None)
