"""The door: a small listener, TLS over TCP, through which the clusters find the run, and find it again.

Each cluster that has an address in ``rendezvous`` listens; each later one keeps a connection to every earlier one that
does. These lines carry the knock, the MPI port strings of the couriers (new at every start, so something must),
goodbyes, signs of life, and by closing tell a leader's death at once. Between two clusters without a line the earliest
door relays. Payloads never pass here.

All ends run in a small thread, so that a death is noticed, and a sign of life given, while the trainer computes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_nebula.errors import ProtocolError, SecurityError
from paddlenlp_nebula.forking import close_in_children
from paddlenlp_nebula.link.admission import Facts
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.pulse import BEAT_S
from paddlenlp_nebula.link.strangers import overdue, to_make_room
from paddlenlp_nebula.link.switchboard import Event, Switchboard
from paddlenlp_nebula.security.identity import Identity

__all__ = ["Door", "Event"]

_UNREAD_BYTES = 1 << 20  # queued for one cluster; who does not read them is gone


class Door:
    """This leader's end of all lines: those to earlier clusters' doors, and, if it listens itself, those of later ones.

    Args:
        cluster: this cluster's name.
        clusters: all names in order.
        where: the doors' addresses, for messages.
        listener: the listening socket, if this cluster has an address.
        timeout_s: seconds after which a silent line is dead at the latest, see `Pulse`.
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
        timeout_s: float,
        on_event: Callable[[Event], None] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.cluster = cluster
        self.clusters = tuple(clusters)
        self.where = where
        self.identity = identity
        self._listener = listener
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._lock = threading.Lock()
        self._board = Switchboard(cluster, clusters, timeout_s, self._tell)
        self._close_by: float | None = None
        self._beat_at = time.monotonic()
        self._wake_thread, self._wake_write = socket.socketpair()
        self._news_read, self._news_write = socket.socketpair()
        for end in (self._wake_thread, self._wake_write, self._news_read, self._news_write):
            end.setblocking(False)
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
            found = list(self._board.events)
            self._board.events.clear()
        return found

    def port(self, cluster: str) -> str | None:
        """The MPI port that a cluster has opened for this one since the run has begun; each is given once."""
        with self._lock:
            return self._board.ports.pop(cluster, None)

    def arrived(self) -> set[str]:
        """The clusters that can be spoken to through a door (this one included)."""
        with self._lock:
            return self._board.arrived()

    def lines(self) -> set[str]:
        """The clusters that there is a line to."""
        with self._lock:
            return self._board.direct()

    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by category."""
        with self._lock:
            return dict(self._board.refusals.counts)

    @property
    def theirs(self) -> Facts | None:
        """The facts of a run that others have begun without this cluster, as soon as any of them has said so."""
        return self._board.theirs

    @property
    def facts(self) -> Facts | None:
        """The facts of this cluster's run, once it has begun."""
        return self._board.facts

    @property
    def closing(self) -> bool:
        """Whether nothing more is to be done for this door."""
        return self._close_by is not None

    def begin(self, facts: Facts | None = None) -> None:
        """The run has started: who knocks from now on is told its facts, or refused if they say so.

        Args:
            facts: ``takes_back`` is true, or says why clusters that come now cannot be taken in; others as you like.
        """
        with self._lock:
            self._board.facts = facts or {"takes_back": "restart all clusters to take it in"}

    def adopt(self, line: Line, body: dict[str, Any]) -> None:
        """Go on with the line to an earlier door that has opened; close it if this door closes.

        Args:
            line: where WELCOME has come.
            body: of that message.

        Raises:
            ProtocolError: it is none that makes sense; the line is closed.
        """
        with self._lock, contextlib.ExitStack() as unless_adopted:
            unless_adopted.callback(line.socket.close)
            if self._board.closing:
                return
            line.prepare(self._timeout_s)
            self._board.adopt(line, body)
            unless_adopted.pop_all()
        self._wake()

    def send(self, kind: Kind, to: str, body: dict[str, Any]) -> None:
        """Tell another cluster something (PORT or LEAVE), directly or relayed by the earliest door."""
        with self._lock:
            self._board.send(kind, {"from": self.cluster, "to": to, **body})
        self._wake()

    def close(self, linger_s: float = 2.0) -> None:
        """Send what is queued, as far as it goes in ``linger_s``, then close every connection. Idempotent."""
        if os.getpid() != self._pid or self._close_by is not None:
            return
        self._close_by = time.monotonic() + linger_s
        with self._lock:
            self._board.closing = True
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
            try:
                while not self._is_done():
                    for line in self._register(selector, registered):
                        self._attend(line, 0)  # what came together with the welcome
                    for key, events in selector.select(timeout=BEAT_S if self._close_by is None else 0.1):
                        self._handle(key, events)
                    self._beat()
                    self._show_out()
            finally:
                for line in self._board.lines:
                    line.socket.close()
                if self._listener is not None:
                    self._listener.close()

    def _is_done(self) -> bool:
        if self._close_by is None:
            return False
        return time.monotonic() >= self._close_by or not any(line.unsent for line in self._board.lines)

    def _register(self, selector: selectors.BaseSelector, registered: dict[Line, int]) -> list[Line]:
        """Watch what there is to be watched; the lines that are new."""
        with self._lock:
            new = [line for line in self._board.lines if line not in registered]
            for line in [line for line in registered if line not in self._board.lines]:
                del registered[line]
                selector.unregister(line.socket)
                line.socket.close()
            for line in self._board.lines:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
                if line not in registered:
                    selector.register(line.socket, wanted, line)
                elif registered[line] != wanted:
                    selector.modify(line.socket, wanted, line)
                registered[line] = wanted
        return new

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
                    self._board.message(line, kind, body)
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
                    self._board.refuse(line, str(error), "nonsense")
            else:
                self._drop(line, str(error))
        except Exception as error:  # whatever a line can bring about, the others must live on
            self._drop(line, f"what it sent cannot be dealt with ({type(error).__name__}: {error})", "nonsense")
        if line.refused and not line.unsent:
            self._drop(line, "it was refused")

    def _answer_knock(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, address = self._listener.accept()
            session = None
            if self.identity is not None:
                session = self.identity.session(server_side=True, allowed=None, peer="a stranger at the door")
            with self._lock:
                line = Line(connection, session=session, address=address[0])
                line.prepare(self._timeout_s)
                self._board.lines.append(line)
            if (crowded_out := to_make_room(self._board.lines)) is not None:
                self._drop(crowded_out, "there were too many strangers at the door", "too many at once")

    def _beat(self) -> None:
        """Give a sign of life, and look for those who give none any more."""
        if self._close_by is not None or time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + BEAT_S
        with self._lock:
            known = [line for line in self._board.lines if line.cluster is not None]
            for line in known:
                line.send(Kind.BEAT, {})
        for line in known:
            if line.pulse is not None and line.pulse.stopped():
                self._drop(
                    line,
                    f"it has given no sign of life for {line.pulse.silent_s:.1f} s: its machine, its process or the line "
                    "stands still",
                )

    def _show_out(self) -> None:
        for line in overdue(self._board.lines):
            self._drop(line, "a stranger at the door must knock within a few seconds", "silence")
        for line in [line for line in self._board.lines if line.unsent > _UNREAD_BYTES and not line.leads_up]:
            self._drop(line, "it does not read what the door sends")

    def _drop(self, line: Line, reason: str, category: str | None = None) -> None:
        with self._lock:
            self._board.drop(line, reason, category)

    def _tell(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            self._news_write.send(b"!")
        if self._on_event is not None:
            self._on_event(event)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def close_in_child(self) -> None:
        """In a forked data worker: close the inherited sockets, or the trainer's death would go unnoticed."""
        for line in self._board.lines:
            line.socket.close()
        if self._listener is not None:
            self._listener.close()
