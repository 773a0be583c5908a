"""A star: one cluster, the hub, linked with each of the others, which are not linked with each other.

Nobody waits for all to be there. The hub opens its door and goes on; the others come, go, and come back whenever they
like, as guests of a run that has begun before any of them (`Door.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paddlenlp_nebula.errors import PeerLost
from paddlenlp_nebula.link.connector import Connector
from paddlenlp_nebula.link.door import Door, Event
from paddlenlp_nebula.link.entrance import Knocker, keep_door, knock
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["Star", "open_star"]


class Star:
    """One end of a star.

    Args:
        link: to nobody yet if there is a door, else to all that there will ever be.
        identity: for TLS; None leaves links plain.
        report: told, in a sentence, of what goes wrong.

    Attributes:
        link: its members are the clusters that can be spoken to, and this one.
        hub: the first cluster.
        ended: clusters that have said goodbye to the hub for good.
    """

    def __init__(self, link: Link, identity: Identity | None, report: Callable[[str], None]) -> None:
        self.link = link
        self.hub = link.clusters[0]
        self.ended: set[str] = set()
        self._report = report
        self._new = list(link.peers)
        self._connector: Connector | None = None
        self._knocker: Knocker | None = None
        if link.door is not None:
            self._connector = Connector(link.door, None if identity is None else identity.credentials)
            self._knocker = Knocker(link.door, report)
        self._want()

    @property
    def others(self) -> tuple[str, ...]:
        """The clusters at the other ends: all but this one for the hub, the hub for all others."""
        is_hub = self.link.cluster == self.hub
        return tuple(name for name in self.link.clusters if name != self.hub) if is_hub else (self.hub,)

    @property
    def returns(self) -> bool:
        """Whether a cluster that is lost can come back."""
        return self._connector is not None

    def look(self) -> list[str]:
        """Take in what has happened, without waiting; the clusters that have come (back) since the last time."""
        link = self.link
        link.departures()  # the last words of an earlier life must not be taken for news
        if self._connector is not None:
            for peer, channel in self._connector.take().items():
                link.host(peer, channel)
                link.admit([*link.members, peer], link.epoch)
                self._new.append(peer)
        found, self._new = self._new, []
        return found

    def lose(self, loss: PeerLost) -> None:
        """A cluster is gone: tell it so, in case it is not, and be ready for its return."""
        self.link.drop(loss)
        if loss.deliberate and self.link.cluster == self.hub:
            self.ended.add(loss.peer)
        self._want()

    def leave(self, reason: str, *, deliberate: bool) -> None:
        """Say goodbye to all with the reason (see `Link.leave`) and free everything. Idempotent."""
        self._stop()
        self.link.leave(reason, deliberate=deliberate)

    def close(self) -> None:
        """Free everything without a word. Idempotent."""
        self._stop()
        self.link.close()

    def _stop(self) -> None:
        if self._knocker is not None and self._connector is not None:
            self._knocker.close()
            self._connector.close()

    def _want(self) -> None:
        if self._connector is not None:
            away = set(self.others) - set(self.link.members) - self.ended
            self._connector.want(away)


def open_star(
    cluster: str,
    clusters: Sequence[str],
    rendezvous: str,
    *,
    timeout_s: float,
    report: Callable[[str], None],
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda sentence: None,
    identity: Identity | None = None,
) -> Star:
    """Open the hub's door, or knock at it.

    Args:
        cluster: this cluster's name.
        clusters: all names, the hub's first, in the same order everywhere.
        rendezvous: "host:port" of the hub's door, or "loopback": there all must come at once, and nobody comes back.
        timeout_s: longest search for the hub, and later for a silent peer, seconds.
        report: told, in a sentence, of what goes wrong later.
        on_event, on_wait, say, identity: see `rendezvous.open_link`.

    Raises:
        NebulaError: the hub's door was not found in time, or its port cannot be listened on.
        HandshakeError: the hub's door refused this cluster.
        SecurityError: the hub is not who it should be, or takes this one for somebody else.
    """
    hub, *leaves = clusters
    channels: dict[str, Channel] = {}
    door: Door | None = None
    if rendezvous == "loopback":
        from paddlenlp_nebula.transport.loopback import join_loopback

        for leaf in leaves if cluster == hub else [cluster]:
            channels |= join_loopback(cluster, (hub, leaf), timeout_s)
    elif cluster == hub:
        door = keep_door(rendezvous, clusters, timeout_s=timeout_s, on_event=on_event, identity=identity)
        door.begin({"takes_back": True})
    else:
        door = knock(
            rendezvous,
            cluster,
            clusters,
            timeout_s=timeout_s,
            on_event=on_event,
            identity=identity,
            while_waiting=on_wait,
            say=say,
        )
        door.begin({"takes_back": True})
    link = Link(cluster, clusters, channels, timeout_s=timeout_s, door=door)
    link.on_wait = on_wait
    return Star(link, identity, report)
