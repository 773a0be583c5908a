"""Coming to a door: opening one's own, knocking at those of earlier clusters, and knocking again when a line is lost."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_nebula.errors import HandshakeError, NebulaError, ProtocolError, SecurityError
from paddlenlp_nebula.link.addresses import doors
from paddlenlp_nebula.link.deadlines import Backoff, Reminder
from paddlenlp_nebula.link.door import Door, Event
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.strangers import MAX_STRANGERS
from paddlenlp_nebula.security.identity import Identity

__all__ = ["Knocker", "keep_door", "knock"]

_KNOCK_TIMEOUT_S = 5.0
_RETRY_S = 0.3
_LONGEST_RETRY_S = 5.0


def keep_door(
    rendezvous: str,
    clusters: Sequence[str],
    cluster: str | None = None,
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    identity: Identity | None = None,
) -> Door:
    """A cluster's end of all lines, its door included if it has an address.

    Args:
        rendezvous: "host:port" to listen on, several separated by commas: see `doors`; a host that isn't an address of
            this machine (a public name behind a router) means all addresses.
        clusters: all names in order.
        cluster: this one; the first, unless said otherwise.
        timeout_s: silence after which a TCP peer counts as dead.
        on_event, identity: see `Door`.

    Raises:
        NebulaError: the port cannot be listened on.
    """
    cluster = clusters[0] if cluster is None else cluster
    where = doors(rendezvous, clusters).get(cluster)
    listener = None
    if where is not None:
        host, _, port = where.rpartition(":")
        try:
            listener = _listen(host.strip("[]"), int(port))
        except OSError as error:
            raise NebulaError(
                f"cluster {cluster!r} must open the run's door at rendezvous={where!r}, but cannot listen there "
                f"({error.strerror or error}): is {cluster!r} started already? Else "
                "choose a free port of this machine"
            ) from None
        listener.setblocking(False)
    return Door(
        cluster,
        clusters,
        rendezvous,
        listener=listener,
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
    rendezvous: str,
    cluster: str,
    clusters: Sequence[str],
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    identity: Identity | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Door:
    """Knock at the earlier clusters' doors until the first one opens, or any whose run has begun already.

    Args:
        rendezvous: as for `keep_door`.
        cluster: this cluster.
        clusters: all names in order.
        timeout_s: how long to keep trying, seconds.
        on_event, identity: see `Door`.
        while_waiting: called between attempts.
        say: told now and then what is being waited for.

    Raises:
        NebulaError: nobody opened in time.
        HandshakeError: the door refused, with its reason.
        SecurityError: what opens is not the cluster that it should be, or does not take us for who we are.
    """
    door = keep_door(rendezvous, clusters, cluster, timeout_s=timeout_s, on_event=on_event, identity=identity)
    try:
        _find(door, timeout_s, while_waiting, Reminder(say))
    except BaseException:
        door.close()
        raise
    return door


def _find(door: Door, timeout_s: float, while_waiting: Callable[[], None], reminder: Reminder) -> None:
    first, *others = _earlier(door)
    deadline = time.monotonic() + timeout_s
    trouble = "nothing answered"
    while (left_s := deadline - time.monotonic()) > 0:
        while_waiting()
        reminder.say(f"still looking for cluster {first[0]!r} at {first[1]} ({trouble}), {left_s:.0f} s more")
        try:
            door.adopt(*_introduce(door, *first, left_s))
            return
        except (OSError, EOFError) as error:
            trouble = str(error) or "the connection was closed"
        for other in others:  # the first may be gone for good, and the run under way without it
            if other[0] not in door.lines():
                with contextlib.suppress(OSError, EOFError, HandshakeError):
                    door.adopt(*_introduce(door, *other, left_s))
        if door.theirs is not None:
            return
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise NebulaError(
        f"cluster {door.cluster!r} looked for cluster {first[0]!r} at rendezvous={first[1]!r} for {timeout_s:g} s and did "
        f"not find it ({trouble}): is it started, and is the port open in its firewall?"
    )


def _earlier(door: Door) -> list[tuple[str, str]]:
    """The doors of earlier clusters, in order; of the first one in any case."""
    places = doors(door.where, door.clusters)
    earlier = itertools.takewhile(lambda name: name != door.cluster, door.clusters)
    return [(name, places[name]) for name in earlier if name in places]


class Knocker:
    """Keeps a line to each earlier cluster that has a door, in a thread: knocks again, less and less often.

    Args:
        door: gets the lines.
        say: told, in a sentence, of a refusal.
    """

    def __init__(self, door: Door, say: Callable[[str], None]) -> None:
        self._door = door
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._knock, name="nebula-knocker", daemon=True)
        if _earlier(door):
            self._thread.start()

    def close(self) -> None:
        """End the thread; an attempt that it is in the middle of is not waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(0.1)

    def _knock(self) -> None:
        backoff = Backoff()
        while not self._stop.wait(_RETRY_S):
            lines = self._door.lines()
            for cluster, where in _earlier(self._door):
                if cluster in lines:
                    backoff.relax(cluster)
                elif backoff.due(cluster) and not self._stop.is_set():
                    self._try(cluster, where)
                    backoff.failed(
                        cluster, 1.6 * _RETRY_S, _LONGEST_RETRY_S, factor=1.6, spread=0.3
                    )  # until a line is seen

    def _try(self, cluster: str, where: str) -> None:
        try:
            self._door.adopt(*_introduce(self._door, cluster, where, _KNOCK_TIMEOUT_S))
        except (OSError, EOFError):
            return
        except NebulaError as error:
            self._say(str(error))


def _introduce(door: Door, keeper: str, where: str, left_s: float) -> tuple[Line, dict[str, Any]]:
    """Knock once; returns the line and what the door welcomed us with."""
    host, _, port = where.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(_KNOCK_TIMEOUT_S, left_s))
    session = None
    if door.identity is not None:
        peer = f"cluster {keeper!r}, at the door {where},"
        session = door.identity.session(server_side=False, allowed=[keeper], peer=peer)
    line = Line(connection, keeper, session, leads_up=True)
    deadline = time.monotonic() + _KNOCK_TIMEOUT_S
    try:
        body = {"cluster": door.cluster, "clusters": list(door.clusters), "protocol": PROTOCOL_VERSION}
        line.send(Kind.KNOCK, {**body, "run": door.facts})
        line.flush()
        while (message := next(line.messages(), None)) is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(left_s)
            line.fill()
            line.flush()
        kind, body = message
        if kind is Kind.REFUSED:
            raise HandshakeError(f"the door at {where} refused cluster {door.cluster!r}: {body.get('reason')}")
        if kind is not Kind.WELCOME:
            raise ProtocolError(f"the door at {where} must answer a knock, got {kind.name}")
        return line, body
    except SecurityError as error:
        line.last_word(str(error))
        connection.close()
        raise
    except BaseException:
        connection.close()
        raise
