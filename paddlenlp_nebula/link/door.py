"""The door: a small listener of the first cluster, TLS over TCP, through which the others find the run.

Every leader keeps one connection to it open for the whole run. It carries the knock, the MPI port
strings of the couriers (new at every start, so something must), goodbyes, and by closing it tells
a leader's death at once. The first cluster relays between the others. Payloads never pass here.

Both ends run in a small thread, so that a death is noticed while the trainer computes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_nebula.errors import ProtocolError, SecurityError
from paddlenlp_nebula.forking import close_in_children
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.strangers import Refusals, overdue, to_make_room
from paddlenlp_nebula.security.identity import Identity

__all__ = ["Door", "Event", "arrivals"]

_UNREAD_BYTES = 1 << 20  # queued for one member; who does not read them is gone


@dataclass(frozen=True, slots=True)
class Event:
    """Something the door reports: ``kind`` is PORT, GONE, LEAVE or REFUSED; ``cluster`` who it is about.

    A REFUSED one without a cluster is about a stranger, and for the log alone.
    """

    kind: Kind
    cluster: str
    body: dict[str, Any]


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
        on_event: called from the door's thread with each event, for the log, besides queueing it for the run.
        identity: for TLS; None makes the door a plain one.
    """

    def __init__(
        self,
        cluster: str,
        clusters: Sequence[str],
        where: str,
        *,
        listener: socket.socket | None,
        line: Line | None,
        arrived: Iterable[str] = (),
        timeout_s: float,
        on_event: Callable[[Event], None] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.cluster = cluster
        self.clusters = tuple(clusters)
        self.where = where
        self._listener = listener
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._identity = identity
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._arrived: set[str] = set(arrived)
        self._lines: list[Line] = []
        self._open_to_newcomers = True
        self._goodbyes: set[tuple[str, str]] = set()  # who has said goodbye to whom
        self._complete: list[str] = []  # whose training is, as they have told us
        self._close_by: float | None = None
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

    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by category."""
        with self._lock:
            return dict(self._refusals.counts)

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
        """Send what is queued, as far as it goes in ``linger_s``, then close every connection. Idempotent."""
        if os.getpid() != self._pid or self._close_by is not None:
            return
        self._close_by = time.monotonic() + linger_s
        self._wake()
        self._thread.join(linger_s + 1.0)
        for end in (self._wake_thread, self._wake_write, self._news_read, self._news_write):
            end.close()

    # What follows runs in the door's thread, or under its lock.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_thread, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            registered: dict[Line, int] = {}
            for line in tuple(self._lines):
                self._attend(line, 0)  # what came together with the welcome
            try:
                while not self._is_done():
                    self._register(selector, registered)
                    for key, events in selector.select(timeout=1.0 if self._close_by is None else 0.1):
                        self._handle(key, events)
                    self._show_out()
            finally:
                for line in self._lines:
                    line.socket.close()
                if self._listener is not None:
                    self._listener.close()

    def _is_done(self) -> bool:
        if self._close_by is None:
            return False
        return time.monotonic() >= self._close_by or not any(line.unsent for line in self._lines)

    def _register(self, selector: selectors.BaseSelector, registered: dict[Line, int]) -> None:
        with self._lock:
            for line in [line for line in registered if line not in self._lines]:
                del registered[line]
                selector.unregister(line.socket)
                line.socket.close()
            for line in self._lines:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
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

    def _attend(self, line: Line, events: int) -> None:
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
        except SecurityError as error:
            line.last_word(str(error))
            self._drop(line, str(error), error.category)
        except ProtocolError as error:
            if line.cluster is None:
                with self._lock:
                    self._refuse(line, str(error), "nonsense")
            else:
                self._drop(line, str(error))
        if line.refused and not line.unsent:
            self._drop(line, "it was refused")

    def _answer_knock(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, address = self._listener.accept()
            session = None
            if self._identity is not None:
                session = self._identity.session(server_side=True, allowed=None, peer="a stranger at the door")
            with self._lock:
                self._adopt(connection)
                self._lines.append(Line(connection, session=session, address=address[0]))
            if (crowded_out := to_make_room(self._lines)) is not None:
                self._drop(crowded_out, "there were too many strangers at the door", "too many at once")

    def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Keep-alive finds a machine that lost its power; it must not be stricter than sync_timeout_s.
        interval_s = max(1, int(self._timeout_s / 8))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 7)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(1000 * self._timeout_s)))

    def _show_out(self) -> None:
        for line in overdue(self._lines):
            self._drop(line, "a stranger at the door must knock within a few seconds", "silence")
        unread = [line for line in self._lines if line.unsent > _UNREAD_BYTES and self._listener is not None]
        for line in unread:
            self._drop(line, "it does not read what the door sends")

    def _message(self, line: Line, kind: Kind, body: dict[str, Any]) -> None:
        keeps = self._listener is not None
        if line.cluster is None:
            if kind is not Kind.KNOCK:
                raise ProtocolError(f"a stranger at the door must KNOCK first, got {kind.name}")
            self._admit(line, body)
        elif kind is Kind.WELCOME and not keeps:
            self._arrived.update(arrivals(body, self.clusters))
        elif kind in (Kind.PORT, Kind.LEAVE) or (kind is Kind.GONE and not keeps):
            sender = line.cluster if keeps else body.get("from")  # nobody speaks for another
            to = body.get("to")
            if sender not in self.clusters or to not in self.clusters:
                raise ProtocolError(f"a {kind.name} message must be from one cluster to another, got {sender} to {to}")
            if kind is Kind.LEAVE:
                self._goodbyes.add((sender, to))
                if to == self.cluster and body.get("deliberate"):
                    self._complete.append(sender)
            elif kind is Kind.GONE:
                self._arrived.discard(sender)
            if to == self.cluster:
                self._report(Event(kind, sender, body))
            elif keeps:
                self._route(kind, {**body, "from": sender})
        else:
            raise ProtocolError(f"cluster {line.cluster!r} sent a {kind.name} message to the door, which expects none")

    def _admit(self, line: Line, body: dict[str, Any]) -> None:
        name, clusters, protocol = body.get("cluster"), body.get("clusters"), body.get("protocol")
        if line.session is not None and name not in line.session.names:
            shown = ", ".join(sorted(line.session.names)) or "no cluster"
            impostor = f"who knocks as {name!r:.80} must show a certificate for that cluster, got one for {shown:.80}"
            self._refuse(line, impostor, "a certificate for another name")
            return
        if self._close_by is not None or name in self._complete:
            raise EOFError  # it comes for the script's next run, whose door this is not, and will knock again
        known = name in self.clusters[1:] and all(name != other.cluster for other in self._lines)
        mismatch = refusal = None
        if protocol != PROTOCOL_VERSION:
            mismatch = (
                f"cluster {self.cluster!r} speaks protocol version {PROTOCOL_VERSION} but cluster {name!r:.80} "
                f"{protocol!r:.80}: install the same release of paddlenlp-nebula on all clusters"
            )
        elif clusters != list(self.clusters):
            mismatch = (
                f"cluster {self.cluster!r} has clusters={list(self.clusters)} but cluster {name!r:.80} has "
                f"clusters={clusters!r:.800}: set the same clusters, in the same order, on all of them"
            )
        elif name not in self.clusters[1:]:
            refusal = (
                f"{name!r:.80} cannot knock: clusters are {', '.join(self.clusters)}, and the first keeps the door"
            )
        elif not known:
            refusal = f"cluster {name!r} is already in the run: is it started twice?"
        elif not self._open_to_newcomers:
            refusal = "the run has already started without it: restart all clusters to take it in"
        if mismatch and known and self._open_to_newcomers:
            self._report(Event(Kind.REFUSED, str(name), {"reason": mismatch}))
        if reason := mismatch or refusal:
            self._refuse(line, reason, "a knock")
            return
        line.cluster = str(name)
        if line.session is not None:
            line.session.peer = f"cluster {line.cluster!r}"
        self._arrived.add(line.cluster)
        arrived = sorted(self._arrived | {self.cluster})
        for other in self._lines:
            if other.cluster is not None:
                other.send(Kind.WELCOME, {"arrived": arrived})

    def _refuse(self, line: Line, reason: str, category: str) -> None:
        """Turn a stranger away, and tell it why."""
        if not line.refused:
            line.send(Kind.REFUSED, {"reason": reason})
            line.refused = True
            self._count(line, reason, category)

    def _count(self, line: Line, reason: str, category: str) -> None:
        """Count a stranger that is turned away: for log and report alone, since nobody outside can end a run."""
        if self._refusals.note(category) and self._on_event is not None:
            count = self._refusals.counts[category]
            self._on_event(Event(Kind.REFUSED, "", {"reason": reason, "address": line.address, "count": count}))

    def _route(self, kind: Kind, body: dict[str, Any]) -> None:
        for line in self._lines:
            if line.cluster == body["to"] or self._listener is None:
                line.send(kind, body)

    def _drop(self, line: Line, reason: str, category: str | None = None) -> None:
        with self._lock:
            if line not in self._lines:
                return
            self._lines.remove(line)
            gone = line.cluster
            if gone is None:
                if category is not None:
                    self._count(line, reason, category)
                return
            self._arrived.discard(gone)
            # After a goodbye a closed connection is no news.
            if (gone, self.cluster) not in self._goodbyes and self._close_by is None:
                self._report(Event(Kind.GONE, gone, {"reason": reason}))
            for other in self._lines:
                if self._listener is not None and other.cluster and (gone, other.cluster) not in self._goodbyes:
                    other.send(Kind.GONE, {"from": gone, "to": other.cluster, "reason": reason})

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


def arrivals(body: dict[str, Any], clusters: Sequence[str]) -> list[str]:
    """The clusters that a WELCOME message names.

    Raises:
        ProtocolError: they are not clusters of the run.
    """
    names = body.get("arrived")
    if not isinstance(names, list) or any(name not in clusters for name in names):
        raise ProtocolError(f"a WELCOME message must name clusters of the run, got {names!r:.80}")
    return names
