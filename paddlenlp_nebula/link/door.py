"""The door: a small TCP listener of the first cluster, through which the others find the run.

Every leader keeps one connection to it open for the whole run. It carries the knock, the MPI port
strings of the couriers (new at every start, so something must), goodbyes, and by closing it tells
a leader's death at once. The first cluster relays between the others. Payloads never pass here.

Both ends run in a small thread, so that a death is noticed while the trainer computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_nebula.errors import HandshakeError, NebulaError, ProtocolError
from paddlenlp_nebula.forking import close_in_children
from paddlenlp_nebula.link.frames import HEADER_BYTES, PROTOCOL_VERSION, Frame, Kind, checksum

__all__ = ["Door", "Event", "keep_door", "knock"]

_LIMIT_BYTES = 16 << 10
_KNOCK_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64
_RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class Event:
    """Something the door reports: ``kind`` is PORT, GONE or LEAVE; ``cluster`` who it is about."""

    kind: Kind
    cluster: str
    body: dict[str, Any]


@dataclass(eq=False)
class _Line:
    """One TCP connection and its unfinished bytes."""

    socket: socket.socket
    cluster: str | None = None  # None until it has knocked
    since: float = field(default_factory=time.monotonic)
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.outgoing += Frame(kind, len(payload), checksum=checksum(payload)).pack() + payload

    def fill(self) -> None:
        """Read what is there; raises EOFError when the other side has closed."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(_LIMIT_BYTES)
            if not data:
                raise EOFError
            self.incoming += data

    def messages(self) -> Iterator[tuple[Kind, dict[str, Any]]]:
        """The complete messages read so far."""
        sender = f"cluster {self.cluster!r}" if self.cluster else "a stranger at the door"
        while len(self.incoming) >= HEADER_BYTES:
            frame = Frame.parse(self.incoming, sender=sender, limit=_LIMIT_BYTES)
            end = HEADER_BYTES + frame.length
            if len(self.incoming) < end:
                return
            payload = bytes(self.incoming[HEADER_BYTES:end])
            frame.verify(payload, sender=sender)
            del self.incoming[:end]
            yield frame.kind, _parse_body(payload, sender)

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]


def _parse_body(payload: bytes, sender: str) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except ValueError as error:
        raise ProtocolError(f"a door message from {sender} must be JSON, got {payload[:40]!r}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"a door message from {sender} must be a JSON object, got {payload[:40]!r}")
    return body


class Door:
    """This leader's end of the door: the listener itself on the first cluster, a connection elsewhere.

    Args:
        cluster: this cluster's name.
        clusters: all names in order.
        where: "host:port", for messages.
        listener: the listening socket (first cluster), or None.
        line: the connection to the first cluster (other clusters), or None.
        arrived: the clusters that had knocked before.
        timeout_s: seconds after which a silent TCP peer counts as dead (keep-alive).
        on_event: called from the door's thread with each event, besides queueing it (for the log).
    """

    def __init__(
        self,
        cluster: str,
        clusters: Sequence[str],
        where: str,
        *,
        listener: socket.socket | None,
        line: _Line | None,
        arrived: Iterable[str] = (),
        timeout_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.cluster = cluster
        self.clusters = tuple(clusters)
        self.where = where
        self._listener = listener
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._arrived: set[str] = set(arrived)
        self._lines: list[_Line] = []
        self._open_to_newcomers = True
        self._goodbyes: set[str] = set()
        self._closing = False
        self._closed = threading.Event()
        self._wake_thread, self._wake_write = socket.socketpair()
        self._news_read, self._news_write = socket.socketpair()
        for end in (self._wake_thread, self._wake_write, self._news_read, self._news_write):
            end.setblocking(False)
        if line is not None:
            self._adopt(line.socket)
            self._lines.append(line)
        self._pid = os.getpid()
        close_in_children(self)
        self._thread = threading.Thread(target=self._serve, name="nebula-door", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when ``events`` has something."""
        return self._news_read.fileno()

    def events(self) -> list[Event]:
        """What has been reported since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._news_read.recv(4096)
        with self._lock:
            found = list(self._events)
            self._events.clear()
        return found

    def arrived(self) -> set[str]:
        """The clusters known to have knocked (this one included)."""
        with self._lock:
            return self._arrived | {self.cluster}

    def begin(self) -> None:
        """The run has started: who knocks from now on is refused."""
        with self._lock:
            self._open_to_newcomers = False

    def send(self, kind: Kind, to: str, body: dict[str, Any]) -> None:
        """Tell another cluster something (PORT or LEAVE), directly or relayed by the first cluster."""
        with self._lock:
            self._route(kind, {"from": self.cluster, "to": to, **body})
        self._wake()

    def close(self, linger_s: float = 2.0) -> None:
        """Send what is queued, then close every connection. Idempotent."""
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        self._wake()
        self._closed.wait(linger_s)
        for end in (self._wake_thread, self._wake_write, self._news_read, self._news_write):
            end.close()

    # What follows runs in the door's thread, or under its lock.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_thread, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            registered: dict[_Line, int] = {}
            for line in tuple(self._lines):
                self._attend(line, 0)  # what came together with the welcome
            try:
                while not (self._closing and not any(line.outgoing for line in self._lines)):
                    self._register(selector, registered)
                    for key, events in selector.select(timeout=1.0):
                        self._handle(key, events)
                    self._show_out_strangers()
            finally:
                for line in self._lines:
                    line.socket.close()
                if self._listener is not None:
                    self._listener.close()
                self._closed.set()

    def _register(self, selector: selectors.BaseSelector, registered: dict[_Line, int]) -> None:
        with self._lock:
            for line in [line for line in registered if line not in self._lines]:
                del registered[line]
                selector.unregister(line.socket)
                line.socket.close()
            for line in self._lines:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.outgoing else 0)
                if line not in registered:
                    selector.register(line.socket, wanted, line)
                elif registered[line] != wanted:
                    selector.modify(line.socket, wanted, line)
                registered[line] = wanted

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._wake_thread:
            with contextlib.suppress(BlockingIOError):
                self._wake_thread.recv(4096)
        elif key.fileobj is self._listener:
            self._answer_knock()
        else:
            self._attend(key.data, events)

    def _attend(self, line: _Line, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    line.flush()
            if events & selectors.EVENT_READ:
                line.fill()
            for kind, body in line.messages():
                with self._lock:
                    self._message(line, kind, body)
        except EOFError:
            self._drop(line, "its process ended without a goodbye (its connection to the door closed)")
        except OSError as error:
            self._drop(line, f"its connection to the door broke ({error.strerror or error})")
        except ProtocolError as error:
            self._drop(line, str(error))

    def _answer_knock(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with self._lock:
                if sum(line.cluster is None for line in self._lines) >= _MAX_STRANGERS:
                    connection.close()
                else:
                    self._adopt(connection)
                    self._lines.append(_Line(connection))

    def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Keep-alive finds a machine that lost its power; it must not be stricter than sync_timeout_s.
        interval_s = max(1, int(self._timeout_s / 8))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 7)

    def _show_out_strangers(self) -> None:
        late = time.monotonic() - _KNOCK_TIMEOUT_S
        with self._lock:
            self._lines = [
                line for line in self._lines if line.cluster is not None or line.since > late or line.outgoing
            ]

    def _message(self, line: _Line, kind: Kind, body: dict[str, Any]) -> None:
        if line.cluster is None:
            if kind is not Kind.KNOCK:
                raise ProtocolError(f"a stranger at the door must KNOCK first, got {kind.name}")
            self._admit(line, body)
        elif kind is Kind.WELCOME:
            self._arrived.update(str(name) for name in body.get("arrived", ()))
        elif kind in (Kind.PORT, Kind.LEAVE, Kind.GONE):
            if self._listener is not None:
                body["from"] = line.cluster  # nobody speaks for another
            if kind is Kind.LEAVE:
                self._goodbyes.add(str(body.get("from", line.cluster)))
            if body.get("to", self.cluster) == self.cluster:
                self._report(Event(kind, str(body.get("from", line.cluster)), body))
            elif self._listener is not None:
                self._route(kind, body)
        else:
            raise ProtocolError(f"cluster {line.cluster!r} sent a {kind.name} message to the door, which expects none")

    def _admit(self, line: _Line, body: dict[str, Any]) -> None:
        name = body.get("cluster")
        present = {other.cluster for other in self._lines}
        reason = None
        if body.get("protocol") != PROTOCOL_VERSION:
            reason = f"the run speaks protocol version {PROTOCOL_VERSION}, you speak {body.get('protocol')!r}: install the same release"
        elif body.get("clusters") != list(self.clusters):
            reason = (
                f"cluster {self.cluster!r} has clusters={','.join(self.clusters)!r}, you have {body.get('clusters')!r}"
            )
        elif name not in self.clusters[1:]:
            reason = f"{name!r} cannot knock: clusters are {', '.join(self.clusters)} and the first one keeps the door"
        elif name in present:
            reason = f"cluster {name!r} is already in the run: is it started twice?"
        elif not self._open_to_newcomers:
            reason = "the run has already started without it: restart all clusters to take it in"
        if reason is not None:
            line.send(Kind.REFUSED, {"reason": reason})
            return
        line.cluster = str(name)
        self._arrived.add(line.cluster)
        arrived = sorted(self._arrived | {self.cluster})
        for other in self._lines:
            if other.cluster is not None:
                other.send(Kind.WELCOME, {"arrived": arrived})

    def _route(self, kind: Kind, body: dict[str, Any]) -> None:
        to = body["to"]
        for line in self._lines:
            if line.cluster == to or self._listener is None:
                line.send(kind, body)

    def _drop(self, line: _Line, reason: str) -> None:
        with self._lock:
            if line not in self._lines:
                return
            self._lines.remove(line)
            if line.cluster is None:
                return
            self._arrived.discard(line.cluster)
            if line.cluster in self._goodbyes:
                return  # a closed connection is what a goodbye leads to
            if not self._closing:
                self._report(Event(Kind.GONE, line.cluster, {"reason": reason}))
            for other in self._lines:
                if self._listener is not None and other.cluster is not None:
                    other.send(Kind.GONE, {"from": line.cluster, "to": other.cluster, "reason": reason})

    def _report(self, event: Event) -> None:
        self._events.append(event)
        with contextlib.suppress(OSError):
            self._news_write.send(b"!")
        if self._on_event is not None:
            self._on_event(event)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def close_in_child(self) -> None:
        """In a forked data worker: close the inherited sockets, or the trainer's death would go unnoticed."""
        for line in self._lines:
            line.socket.close()
        if self._listener is not None:
            self._listener.close()


def keep_door(
    where: str, clusters: Sequence[str], *, timeout_s: float, on_event: Callable[[Event], None] | None = None
) -> Door:
    """Open the door of the first cluster.

    Args:
        where: "host:port" to listen on; a host that isn't an address of this machine (a public name
            behind a router) means all addresses.
        clusters: all names in order; the first is this cluster.
        timeout_s: silence after which a TCP peer counts as dead.
        on_event: see `Door`.

    Raises:
        NebulaError: the port cannot be listened on.
    """
    host, _, port = where.rpartition(":")
    last: OSError | None = None
    for address in (host.strip("[]"), ""):
        try:
            listener = socket.create_server(
                (address, int(port)),
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                backlog=_MAX_STRANGERS,
            )
        except OSError as error:
            last = error
            continue
        listener.setblocking(False)
        return Door(clusters[0], clusters, where, listener=listener, line=None, timeout_s=timeout_s, on_event=on_event)
    assert last is not None
    raise NebulaError(
        f"cluster {clusters[0]!r} must open the run's door at rendezvous={where!r}, but cannot listen there "
        f"({last.strerror or last}): choose a free port of this machine"
    )


def knock(
    where: str,
    cluster: str,
    clusters: Sequence[str],
    *,
    timeout_s: float,
    on_event: Callable[[Event], None] | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Door:
    """Knock at the first cluster's door until it opens.

    Args:
        where: "host:port" of the door.
        cluster: this cluster.
        clusters: all names in order.
        timeout_s: how long to keep trying, seconds.
        on_event: see `Door`.
        while_waiting: called between attempts.

    Raises:
        NebulaError: nobody opened in time.
        HandshakeError: the door refused, with its reason.
    """
    host, _, port = where.rpartition(":")
    deadline = time.monotonic() + timeout_s
    trouble = "nothing answered"
    while (left_s := deadline - time.monotonic()) > 0:
        while_waiting()
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(_KNOCK_TIMEOUT_S, left_s))
            line, arrived = _introduce(connection, cluster, clusters, where)
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


def _introduce(connection: socket.socket, cluster: str, clusters: Sequence[str], where: str) -> tuple[_Line, list[str]]:
    line = _Line(connection, clusters[0])
    line.send(Kind.KNOCK, {"cluster": cluster, "clusters": list(clusters), "protocol": PROTOCOL_VERSION})
    line.flush()
    while True:
        line.fill()
        for kind, body in line.messages():
            if kind is Kind.REFUSED:
                connection.close()
                raise HandshakeError(f"the door at {where} refused cluster {cluster!r}: {body.get('reason')}")
            if kind is not Kind.WELCOME:
                raise ProtocolError(f"the door at {where} must answer a knock, got {kind.name}")
            return line, [str(name) for name in body.get("arrived", ())]
