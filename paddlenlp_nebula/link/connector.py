"""Bringing up couriers: one joining at a time with each peer, at the start of a run and when a cluster comes back.

Of two clusters the earlier one opens an MPI port and accepts; the door carries the port string to the later one, which
connects. One that waits in vain asks for another port, by an empty one: the last may have come at a bad moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from paddlenlp_nebula.errors import ChannelLost, NebulaError
from paddlenlp_nebula.link.deadlines import Backoff
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.security.identity import Credentials
from paddlenlp_nebula.transport.channel import Channel

if TYPE_CHECKING:
    from paddlenlp_nebula.transport.courier import CourierChannel

__all__ = ["Connector", "Joining"]

_ATTEMPT_S = 30.0
_RETRY_S = 1.0
_ASK_S = 5.0  # a courier is there and has sent its port in one or two
_LONGEST_RETRY_S = 60.0  # an attempt whose MPI does not get through keeps a core busy
_LOOK_S = 0.02
_IDLE_S = 0.25


class Joining:
    """A courier, from its start until it has met its counterpart.

    Args:
        door: carries the port.
        peer: the cluster at the other end.
        credentials: for TLS; None leaves the link plain.

    Attributes:
        courier: usable once it is ``connected``.
        accepts: this cluster is the earlier one.
        announced: the peer has been told our port.
    """

    def __init__(self, door: Door, peer: str, credentials: Credentials | None) -> None:
        from paddlenlp_nebula.transport.courier import CourierChannel

        self._door = door
        self.peer = peer
        self.accepts = _accepts(door, peer)
        self.announced = False
        self.courier: CourierChannel = CourierChannel(peer, credentials=credentials)
        if self.accepts:
            self.courier.open_port()

    def advance(self, timeout_s: float) -> None:
        """Do what can be done without waiting.

        Args:
            timeout_s: how long the peer may take from the moment that it has the port.

        Raises:
            ChannelLost: it will never connect.
        """
        self.courier.progress()
        port = self.courier.port
        if self.accepts and port is not None and not self.announced and self.peer in self._door.arrived():
            self.courier.accept(timeout_s)
            self._door.send(Kind.PORT, self.peer, {"port": port})
            self.announced = True

    def connect(self, port: str, timeout_s: float) -> None:
        """The peer has sent us its port."""
        self.courier.connect(port, timeout_s)


class Connector:
    """Joins with clusters that come (back) to the door while the run is under way, in a thread.

    Args:
        door: where they come to.
        credentials: for TLS; None leaves links plain.
        report: told, in a sentence and from the thread, why a link does not come up, at the second try that fails; the
            first may have come at a bad moment.
    """

    def __init__(
        self, door: Door, credentials: Credentials | None, report: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self._door = door
        self._credentials = credentials
        self._report = report
        self._failures: Counter[str] = Counter()  # peer -> in a row
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._joinings: dict[str, Joining] = {}
        self._since: dict[str, float] = {}
        self._backoff = Backoff()
        self._asked: dict[str, float] = {}  # peer -> when it was last asked for another port, or first waited for
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nebula-connector", daemon=True)

    def want(self, clusters: Collection[str]) -> None:
        """Join with these, whenever they are there, and with no other."""
        with self._lock:
            self._wanted = frozenset(clusters)
        if clusters and not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()

    def take(self) -> dict[str, Channel]:
        """The channels that have been connected since the last call, now the caller's."""
        with self._lock:
            ready = [peer for peer, joining in self._joinings.items() if joining.courier.connected]
            self._wanted -= set(ready)
            for peer in ready:
                self._backoff.relax(peer)
                self._asked.pop(peer, None)
                self._failures.pop(peer, None)
            return {peer: self._joinings.pop(peer).courier for peer in ready}

    def close(self) -> None:
        """End the thread and every attempt."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        for joining in self._joinings.values():
            joining.courier.close()
        self._joinings.clear()

    def _work(self) -> None:
        while not self._stop.wait(_LOOK_S if self._joinings else _IDLE_S):
            arrived = self._door.arrived()
            with self._lock:
                for peer in [peer for peer in self._joinings if peer not in self._wanted & arrived]:
                    self._give_up(peer)
                for peer in self._backoff.pauses_s().keys() - arrived:  # when it comes again it may be anew
                    self._backoff.forget(peer)
                for peer in self._wanted & arrived:
                    try:
                        self._advance(peer)
                    except (NebulaError, OSError) as error:  # a courier that does not start, a peer that is gone again
                        self._put_off(peer, error)

    def _advance(self, peer: str) -> None:
        now, joining, port = time.monotonic(), self._joinings.get(peer), self._door.port(peer)
        due = now > self._since.get(peer, 0.0) + _RETRY_S and self._backoff.due(peer)
        if port is not None and joining is not None:
            self._give_up(peer)  # the peer has begun anew, or asks us to
        if port:
            self._begin(peer).connect(port, _ATTEMPT_S)
        elif port is None and joining is not None:
            joining.advance(_ATTEMPT_S)
            if not joining.courier.connected and now > self._since[peer] + 2 * _ATTEMPT_S:
                raise ChannelLost(peer, "it did not connect")
        elif _accepts(self._door, peer):
            if due:
                self._begin(peer)
        elif due and now > self._asked.setdefault(peer, now) + _ASK_S:
            self._asked[peer] = now
            self._door.send(Kind.PORT, peer, {"port": ""})  # the one that we had of it was of no use

    def _begin(self, peer: str) -> Joining:
        self._since[peer] = time.monotonic()
        self._joinings[peer] = joining = Joining(self._door, peer, self._credentials)
        return joining

    def _put_off(self, peer: str, error: Exception) -> None:
        """The attempt has failed: try again, less and less often."""
        self._give_up(peer)
        self._failures[peer] += 1
        if self._failures[peer] == 2:
            reason = error.reason if isinstance(error, ChannelLost) else error
            self._report(
                f"cluster {peer!r} is there again, but the link to it does not come up: {reason}; it is tried on"
            )
        self._backoff.failed(peer, _RETRY_S, _LONGEST_RETRY_S)

    def _give_up(self, peer: str) -> None:
        if (joining := self._joinings.pop(peer, None)) is not None:
            with contextlib.suppress(NebulaError):
                joining.courier.close()


def _accepts(door: Door, peer: str) -> bool:
    """Whether it is this cluster that opens the port."""
    return door.clusters.index(door.cluster) < door.clusters.index(peer)
