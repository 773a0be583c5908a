"""Opening a link: where the leaders find each other and how their channels come up."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from paddlenlp_nebula.errors import ChannelLost, HandshakeError, NebulaError, PeerLost
from paddlenlp_nebula.link.connector import Joining
from paddlenlp_nebula.link.deadlines import Deadline, Reminder
from paddlenlp_nebula.link.door import Door, Event
from paddlenlp_nebula.link.entrance import keep_door, knock
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.security.identity import Credentials, Identity
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["open_link"]

_SELECT_S = 0.2
_LAST_WORDS_S = 0.5  # for the door to say what lies behind the end of a channel


def open_link(
    cluster: str,
    clusters: Sequence[str],
    rendezvous: str,
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda sentence: None,
    identity: Identity | None = None,
) -> Link:
    """Meet all other clusters and return the link to them; a link to nobody if they have begun without this one.

    Args:
        cluster: this cluster's name.
        clusters: all names, in the order of reduction; the first keeps the door.
        rendezvous: "host:port" of the first cluster's door (of more clusters' doors: see `doors`), "world" or "loopback".
        timeout_s: longest wait for the others, and later for a silent peer, seconds.
        on_event: called from the door's thread when a cluster dies or says goodbye.
        on_wait: called at least every 0.2 s while waiting.
        say: told now and then who is being waited for.
        identity: for TLS on everything but ``loopback``; None leaves the links plain.

    Raises:
        NebulaError: a cluster did not come in time; says who is missing and where it was looked for.
        HandshakeError: the door refused this cluster, or (on the first one) another because they do not fit together.
        SecurityError: a cluster is not who it should be, or takes this one for somebody else.
    """
    others = [name for name in clusters if name != cluster]
    channels: dict[str, Channel] = {}
    door: Door | None = None
    if not others:
        pass
    elif rendezvous == "loopback":
        from paddlenlp_nebula.transport.loopback import join_loopback

        channels.update(join_loopback(cluster, clusters, timeout_s))
    elif rendezvous == "world":
        from paddlenlp_nebula.transport.world import join_world

        channels.update(join_world(cluster, clusters, timeout_s, identity=identity))
    else:
        deadline = Deadline(timeout_s)
        if cluster == clusters[0]:
            door = keep_door(rendezvous, clusters, timeout_s=timeout_s, on_event=on_event, identity=identity)
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
        try:
            if door.theirs is None:
                credentials = None if identity is None else identity.credentials
                channels.update(_couriers(door, deadline, on_wait, say, credentials))
        except BaseException:
            door.close()
            raise
        door.begin(door.theirs)
    link = Link(cluster, clusters, channels, timeout_s=timeout_s, door=door)
    link.on_wait = on_wait
    return link


def _couriers(
    door: Door,
    deadline: Deadline,
    on_wait: Callable[[], None],
    say: Callable[[str], None],
    credentials: Credentials | None,
) -> dict[str, Channel]:
    """Start a courier per peer and join each with its counterpart; none if a run turns out to have begun without us."""
    joinings = {peer: Joining(door, peer, credentials) for peer in door.clusters if peer != door.cluster}
    with ExitStack() as unused:
        for joining in joinings.values():
            unused.callback(joining.courier.close)
        try:
            if not _connect(joinings, door, deadline, on_wait, Reminder(say)):
                return {}
        except BaseException as error:
            for peer in joinings:  # at once: a courier that ends says nothing of the reason
                door.send(Kind.LEAVE, peer, {"reason": f"{type(error).__name__}: {error}"[:2000], "deliberate": False})
            raise
        unused.pop_all()
    return {peer: joining.courier for peer, joining in joinings.items()}


def _connect(
    joinings: Mapping[str, Joining],
    door: Door,
    deadline: Deadline,
    on_wait: Callable[[], None],
    reminder: Reminder,
) -> bool:
    """Whether all have met; False if a run has begun without this cluster."""
    lost: ChannelLost | None = None
    couriers = {peer: joining.courier for peer, joining in joinings.items()}
    while not all(courier.connected for courier in couriers.values()):
        if door.theirs is not None:
            return False
        try:
            for joining in joinings.values():
                joining.advance(deadline.remaining_s())
        except ChannelLost as error:
            if lost is None:
                lost, deadline = error, Deadline(_LAST_WORDS_S)
        for event in door.events():
            if event.kind is Kind.PORT and event.cluster in joinings and not joinings[event.cluster].accepts:
                joinings[event.cluster].connect(str(event.body.get("port")), deadline.remaining_s())
            elif event.kind is Kind.REFUSED:
                raise HandshakeError(f"the clusters do not fit together: {event.body.get('reason')}")
            elif event.kind in (Kind.GONE, Kind.LEAVE):
                raise PeerLost(event.cluster, f"while the clusters were meeting: {event.body.get('reason')}")
        if deadline.passed():
            unjoined = [peer for peer, courier in couriers.items() if not courier.connected]
            raise lost or NebulaError(_who_is_missing(door, door.cluster, door.clusters, unjoined, deadline.timeout_s))
        missing = [name for name in door.clusters if name not in door.arrived()]
        what = f"{', '.join(map(repr, missing))} to knock at {door.where}" if missing else "MPI to connect"
        reminder.say(f"still waiting for {what}, {deadline.remaining_s():.0f} s more")
        _sleep([door.fileno(), *(courier.fileno() for courier in couriers.values())])
        on_wait()
    return True


def _who_is_missing(
    door: Door, cluster: str, clusters: Sequence[str], unjoined: Sequence[str], timeout_s: float
) -> str:
    absent = [name for name in clusters if name not in door.arrived()]
    if absent:
        refused = ", ".join(f"{count} for {category}" for category, count in door.refusals().items())
        return (
            f"cluster {cluster!r} waited {timeout_s:g} s (sync_timeout_s) at the door {door.where!r} for "
            f"{', '.join(map(repr, absent))}, which never knocked{f' (refused: {refused})' if refused else ''}: is it started, "
            "with the same rendezvous, and is the port open in this site's firewall?"
        )
    return (
        f"cluster {cluster!r} met {', '.join(map(repr, unjoined))} at the door {door.where!r}, but MPI did not connect "
        f"within {timeout_s:g} s (sync_timeout_s): MPI uses TCP ports of its own, are they open in both firewalls?"
    )


def _sleep(descriptors: Sequence[int | None]) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * _SELECT_S)
