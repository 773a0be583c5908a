"""Clusters that come back: who is there, whose group takes in whose members, and the moment at which it does.

A cluster that has lost the others, or was started anew, finds a door again (`Knocker`), gets a channel to each cluster
that it is not together with (`Connector`), and is a *guest* there. Both sides say who is with them (PRESENT). Of two
groups the larger one takes in the other's members, one by one; of two of a size the one that has come further, and of
two that have come as far the one with the earlier cluster.

All members of the group must have the guest as theirs; they see that in each other's openings (``ROUND``), and after
that round all of them invite it. A guest says yes (ACCEPT) between two of its own steps, as soon as everybody has
invited it, and leaves the group it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_nebula.errors import PeerLost, ProtocolError
from paddlenlp_nebula.link.connector import Connector
from paddlenlp_nebula.link.deadlines import Backoff
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.entrance import Knocker
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.security.identity import Credentials

__all__ = ["Group", "Invitation", "Returns"]

_MESSAGES = 16  # of one guest at a time, however many it sends
_PATIENCE_S = 20.0
_RETRY_S = 1.0
_LONGEST_PAUSE_S = 600.0


@dataclass(frozen=True, slots=True)
class Invitation:
    """A group takes this cluster in.

    Attributes:
        members: those of the group, and this cluster.
        number: the group's last completed exchange.
        epoch: the group's from here on.
    """

    members: tuple[str, ...]
    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Group:
    """Clusters that are together.

    Attributes:
        members: who they are.
        number: their last completed exchange.
    """

    members: tuple[str, ...]
    number: int

    def outranks(self, other: Group, clusters: Sequence[str]) -> bool:
        """Whether it takes in the other's members, rather than the other way round; ``clusters``: all in order."""

        def rank(group: Group) -> tuple[int, int, int]:
            return len(group.members), group.number, -min(clusters.index(name) for name in group.members)

        return rank(self) > rank(other)


class Returns:
    """Watches for clusters that come back, on a leader whose run is under way.

    Args:
        link: to the members; it must have a door.
        credentials: for TLS; None leaves links plain.
        report: told, in a sentence, of what goes wrong.
    """

    def __init__(self, link: Link, credentials: Credentials | None, report: Callable[[str], None]) -> None:
        door = link.door
        assert isinstance(door, Door)
        self._link = link
        self._door = door
        self._connector = Connector(door, credentials, report)
        self._knocker = Knocker(door, report)
        self._present: dict[str, Group] = {}  # guest -> its group
        self._invitations: dict[str, Invitation] = {}  # by the member that has sent it
        self._told: dict[str, Group] = {}  # guest -> our group, as we have told it
        self._backoff = Backoff()  # of invitations
        self._looked_at: float | None = None
        self._interval_s = 0.0  # between two looks: a step, or a round

    def candidates(self, number: int) -> tuple[str, ...]:
        """The guests that may be invited, as far as this cluster is concerned.

        Args:
            number: the last exchange that this cluster has completed.
        """
        ours = self._look(number)
        return tuple(
            guest
            for guest in self._link.guests
            if guest in self._present
            and ours.outranks(self._present[guest], self._link.clusters)
            and self._backoff.due(guest)
        )

    def expected(self) -> tuple[str, ...]:
        """The clusters that are no members and are there, or at a door on their way."""
        link, arrived = self._link, self._door.arrived()
        return tuple(name for name in link.clusters if name in arrived and name not in link.members)

    @property
    def patience_s(self) -> float:
        """How long an invited guest may take to answer: it does between two steps, and an evaluation is longer."""
        return max(_PATIENCE_S, 5 * self._interval_s)

    def missed(self, guest: str, seconds: float) -> None:
        """It has been waited for in vain: it is asked less and less often, the more the longer that has taken."""
        self._backoff.failed(guest, max(_RETRY_S, 2 * seconds), _LONGEST_PAUSE_S)

    def met(self, guest: str) -> None:
        """It has answered, and need not wait if it is lost and comes back once more."""
        self._backoff.forget(guest)

    def invitation(self, number: int) -> Invitation | None:
        """That of a group, once all of its members have sent it; ``number``: as above.

        They have found that it outranks ours by what we had told them. Since then we may have come further, which changes
        nothing, or both would wait for the other; only if ours is the larger one by now are they to come to us.
        """
        ours = self._look(number)
        link = self._link
        for guest, invitation in tuple(self._invitations.items()):
            inviting = tuple(name for name in invitation.members if name != link.cluster)
            if len(inviting) < len(ours.members):
                link.dismiss(guest)  # who waits for our answer must not wait for long
                self._forget(guest)
            elif all(self._invitations.get(name) == invitation for name in inviting):
                return invitation
        return None

    def invite(self, guest: str, number: int) -> None:
        """Make the guest a member and tell it so.

        Every member must call this at the same moment: after the same exchange.

        Args:
            guest: one of the `candidates` of all members.
            number: the last completed exchange.
        """
        link = self._link
        link.admit([*link.members, guest], link.epoch + 1)
        link.post(Kind.INVITE, pack_note({"members": link.members, "number": number, "epoch": link.epoch}), to=[guest])
        self._forget(guest)

    def accept(self, invitation: Invitation) -> None:
        """Go over to the group that has invited us, and tell its members so."""
        link = self._link
        others = [name for name in invitation.members if name != link.cluster]
        for peer in link.peers:
            link.drop(PeerLost(peer, f"this cluster goes over to {', '.join(others)}"))
        link.admit(invitation.members, invitation.epoch)
        link.post(Kind.ACCEPT, pack_note({}), to=others)
        for name in others:
            self._forget(name)

    def close(self) -> None:
        """Stop watching."""
        self._knocker.close()
        self._connector.close()

    def _look(self, number: int) -> Group:
        """Take in what has happened since the last time, without waiting; returns our own group."""
        link = self._link
        ours = Group(link.members, number)
        now = time.monotonic()
        self._interval_s = max(now - (self._looked_at or now), 0.9 * self._interval_s)  # several looks may go together
        self._looked_at = now
        link.departures()  # the last words of an earlier life must not be taken for news
        arrived = self._door.arrived()
        for peer, channel in self._connector.take().items():
            link.host(peer, channel)
            self._forget(peer)
        for guest in link.guests:
            if guest not in arrived:  # and so the end of its channel may go unnoticed
                link.dismiss(guest)
                self._forget(guest)
                continue
            if self._told.get(guest) != ours:
                self._told[guest] = ours
                link.post(Kind.PRESENT, pack_note({"members": ours.members, "number": number}), to=[guest])
            try:
                for _ in range(_MESSAGES):
                    if (heard := link.hear(guest)) is not None:
                        self._hear(guest, *heard)
            except (PeerLost, ProtocolError):  # it may come again
                link.dismiss(guest)
                self._forget(guest)
        self._connector.want([name for name in link.clusters if name not in (*link.members, *link.guests)])
        return ours

    def _hear(self, guest: str, kind: Kind, note: dict[str, Any]) -> None:
        members, number = note.get("members"), note.get("number")
        if not isinstance(members, list) or any(name not in self._link.clusters for name in members):
            raise ProtocolError(f"cluster {guest!r} must name clusters of the run as members, got {members!r:.80}")
        if guest not in members:
            raise ProtocolError(f"cluster {guest!r} must be a member of its own group, got {members}")
        if len({*members}) < len(members):  # one would look like many, and take us out of our group
            raise ProtocolError(f"cluster {guest!r} must name each member of its group once, got {members!r:.80}")
        if not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise ProtocolError(f"cluster {guest!r} must say how far it has come, got {number!r:.80}")
        if kind is Kind.PRESENT:
            self._present[guest] = Group(tuple(members), number)
            self._invitations.pop(guest, None)  # of a group that is another one by now
        elif kind is Kind.INVITE:
            epoch = note.get("epoch")
            if not isinstance(epoch, int) or not 0 <= epoch < 1 << 31:  # a frame has room for twice as many
                raise ProtocolError(f"cluster {guest!r} must invite into an epoch, got {epoch!r:.80}")
            if self._link.cluster not in members:
                raise ProtocolError(f"cluster {guest!r} must invite this cluster, got {members}")
            self._invitations[guest] = Invitation(tuple(members), number, epoch)
        else:
            raise ProtocolError(f"cluster {guest!r} is no member and must not send {kind.name}")

    def _forget(self, guest: str) -> None:
        for known in (self._present, self._invitations, self._told):
            known.pop(guest, None)
