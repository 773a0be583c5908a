"""Departures: who is gone and why, as far as is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paddlenlp_nebula.errors import PeerLost
from paddlenlp_nebula.link.deadlines import Deadline

__all__ = ["Departures"]

_LAST_WORDS_S = 0.5


class Departures:
    """The losses that have become known, each with its best reason.

    A cluster's own goodbye says more than what others observe of its end. The door is often faster
    than the channel, so after its report the channel has half a second to deliver what the cluster
    had sent before: a last vote, or the numbers that both sides must see to fail alike.

    Args:
        deadline: makes the deadline of those last words (a test's own, otherwise half a second).
    """

    def __init__(self, deadline: Callable[[], Deadline] = lambda: Deadline(_LAST_WORDS_S)) -> None:
        self._deadline = deadline
        self._known: dict[str, PeerLost] = {}
        self._own_words: set[str] = set()
        self._unfinished: dict[str, Deadline] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __getitem__(self, peer: str) -> PeerLost:
        return self._known[peer]

    def forget(self, peer: str) -> None:
        """The peer is back: what is known of its departure belongs to the past."""
        self._known.pop(peer, None)
        self._own_words.discard(peer)
        self._unfinished.pop(peer, None)

    def ended(self, peer: str, reason: str, *, deliberate: bool = False) -> None:
        """Nothing more comes from the peer's channel."""
        self._known.setdefault(peer, PeerLost(peer, reason, deliberate=deliberate))
        self._unfinished.pop(peer, None)

    def said_goodbye(self, peer: str, reason: str, *, deliberate: bool, at_the_door: bool = False) -> None:
        """The peer gave its reason itself; in the channel nothing follows it, the door overtakes the channel."""
        if at_the_door:
            self.reported(peer, reason)
        if peer not in self._own_words:
            self._known[peer] = PeerLost(peer, reason, deliberate=deliberate)
            self._own_words.add(peer)
        if not at_the_door:
            self._unfinished.pop(peer, None)

    def reported(self, peer: str, reason: str) -> None:
        """The door saw the peer go; its channel may still deliver something."""
        if peer not in self._known:
            self._known[peer] = PeerLost(peer, reason)
            self._unfinished[peer] = self._deadline()

    def final(self, peer: str) -> PeerLost | None:
        """The peer's loss, if nothing more is to be expected of it."""
        unfinished = self._unfinished.get(peer)
        return self._known.get(peer) if unfinished is None or unfinished.passed() else None
