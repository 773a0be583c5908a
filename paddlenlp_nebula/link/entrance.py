"""Coming to the door: opening it on the first cluster, knocking at it from the others."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence

from paddlenlp_nebula.errors import HandshakeError, NebulaError, ProtocolError, SecurityError
from paddlenlp_nebula.link.deadlines import Reminder
from paddlenlp_nebula.link.door import Door, Event, arrivals
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.strangers import MAX_STRANGERS
from paddlenlp_nebula.security.identity import Identity

__all__ = ["keep_door", "knock"]

_KNOCK_TIMEOUT_S = 5.0
_RETRY_S = 0.3


def keep_door(
    where: str,
    clusters: Sequence[str],
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    identity: Identity | None = None,
) -> Door:
    """Open the door of the first cluster.

    Args:
        where: "host:port" to listen on; a host that isn't an address of this machine (a public name
            behind a router) means all addresses.
        clusters: all names in order; the first is this cluster.
        timeout_s: silence after which a TCP peer counts as dead.
        on_event, identity: see `Door`.

    Raises:
        NebulaError: the port cannot be listened on.
    """
    host, _, port = where.rpartition(":")
    try:
        listener = _listen(host.strip("[]"), int(port))
    except OSError as error:
        raise NebulaError(
            f"cluster {clusters[0]!r} must open the run's door at rendezvous={where!r}, but cannot listen there "
            f"({error.strerror or error}): is {clusters[0]!r} started already? Else "
            "choose a free port of this machine"
        ) from None
    listener.setblocking(False)
    return Door(
        clusters[0],
        clusters,
        where,
        listener=listener,
        line=None,
        timeout_s=timeout_s,
        on_event=on_event,
        identity=identity,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Listen on ``host`` if it is an address of this machine that others can reach, else on all addresses."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Many systems give their own name a loopback address, where nobody from another site could knock.
        hidden = ipaddress.ip_address(address[0]).is_loopback and host != address[0] and host != "localhost"
        if not hidden:
            return socket.create_server(address[:2], family=family, backlog=MAX_STRANGERS)
    except socket.gaierror:
        pass  # known to the other sites only
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # which a router between them has
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MAX_STRANGERS)
    return socket.create_server(("", port), backlog=MAX_STRANGERS)


def knock(
    where: str,
    cluster: str,
    clusters: Sequence[str],
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    identity: Identity | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Door:
    """Knock at the first cluster's door until it opens.

    Args:
        where: "host:port" of the door.
        cluster: this cluster.
        clusters: all names in order.
        timeout_s: how long to keep trying, seconds.
        on_event, identity: see `Door`.
        while_waiting: called between attempts.
        say: told now and then what is being waited for.

    Raises:
        NebulaError: nobody opened in time.
        HandshakeError: the door refused, with its reason.
        SecurityError: what opens is not the first cluster, or does not take us for who we are.
    """
    host, _, port = where.rpartition(":")
    deadline = time.monotonic() + timeout_s
    trouble = "nothing answered"
    reminder = Reminder(say)
    while (left_s := deadline - time.monotonic()) > 0:
        while_waiting()
        reminder.say(f"still looking for cluster {clusters[0]!r} at {where} ({trouble}), {left_s:.0f} s more")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(_KNOCK_TIMEOUT_S, left_s))
            line, arrived = _introduce(connection, cluster, clusters, where, identity)
        except (OSError, EOFError) as error:
            trouble = str(error) or "the connection was closed"
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        return Door(
            cluster, clusters, where, listener=None, line=line, arrived=arrived, timeout_s=timeout_s, on_event=on_event
        )
    raise NebulaError(
        f"cluster {cluster!r} looked for cluster {clusters[0]!r} at rendezvous={where!r} for {timeout_s:g} s and did not "
        f"find it ({trouble}): is it started, and is the port open in its firewall?"
    )


def _introduce(
    connection: socket.socket, cluster: str, clusters: Sequence[str], where: str, identity: Identity | None
) -> tuple[Line, list[str]]:
    session = None
    if identity is not None:
        peer = f"cluster {clusters[0]!r}, at the door {where},"
        session = identity.session(server_side=False, allowed=clusters[:1], peer=peer)
    line = Line(connection, clusters[0], session)
    deadline = time.monotonic() + _KNOCK_TIMEOUT_S
    try:
        line.send(Kind.KNOCK, {"cluster": cluster, "clusters": list(clusters), "protocol": PROTOCOL_VERSION})
        line.flush()
        while (message := next(line.messages(), None)) is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(left_s)
            line.fill()
            line.flush()
        kind, body = message
        if kind is Kind.REFUSED:
            raise HandshakeError(f"the door at {where} refused cluster {cluster!r}: {body.get('reason')}")
        if kind is not Kind.WELCOME:
            raise ProtocolError(f"the door at {where} must answer a knock, got {kind.name}")
        return line, arrivals(body, clusters)
    except SecurityError as error:
        line.last_word(str(error))
        connection.close()
        raise
    except BaseException:
        connection.close()
        raise
