"""A line: one TCP connection to the door, carrying frames whose payloads are notes. Never blocks by itself."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.link.pulse import Pulse
from paddlenlp_nebula.security.session import RECORD_BYTES, Session

__all__ = ["LIMIT_BYTES", "Line"]

LIMIT_BYTES = 16 << 10
"""Longest payload of a message at the door."""


@dataclass(eq=False)
class Line:
    """One TCP connection and its unfinished bytes.

    Attributes:
        socket: the connection.
        cluster: who is at the other end; None until it has knocked.
        session: its TLS session; None where the door is plain.
        address: where it comes from.
        since: when it came, monotonic seconds.
        refused: it has been turned away and leaves as soon as it has been told.
        leads_up: it is ours to an earlier cluster's door, which speaks for others, too.
        reaches: whom one can speak to through that door.
        pulse: when anything has come; None before it is known who is there.
    """

    socket: socket.socket
    cluster: str | None = None
    session: Session | None = None
    address: str = ""
    since: float = field(default_factory=time.monotonic)
    refused: bool = False
    leads_up: bool = False
    reaches: set[str] = field(default_factory=set)
    pulse: Pulse | None = None
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    _sealed: bytearray = field(default_factory=bytearray)

    def prepare(self, timeout_s: float) -> None:
        """Never block, delay nothing, and let the system find a machine that lost its power, within ``timeout_s``."""
        connection = self.socket
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        interval_s = max(1, int(timeout_s / 8))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 7)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(1000 * timeout_s)))

    def send(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Queue a message."""
        payload = pack_note(body)
        self.outgoing += Frame(kind, len(payload), checksum=checksum(payload)).pack() + payload

    @property
    def unsent(self) -> int:
        """Bytes that the connection has not taken yet."""
        return len(self.outgoing) + len(self._sealed)

    def flush(self) -> None:
        """Send what the connection takes.

        Raises:
            SecurityError: the other side's certificate is refused.
        """
        ready = self.outgoing
        if self.session is not None:
            if self.session.handshake():
                self.session.write(self.outgoing)
                self.outgoing.clear()
            self._sealed += self.session.take()
            ready = self._sealed
        with contextlib.suppress(BlockingIOError):
            while ready:
                del ready[: self.socket.send(ready)]

    def fill(self) -> None:
        """Read what is there; raises EOFError when the other side has closed.

        Raises:
            SecurityError: the other side is refused, refuses us, or its bytes were altered.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(LIMIT_BYTES)
            if not data:
                raise EOFError
            if self.session is None:
                self.incoming += data
            else:
                self._open(self.session, data)

    def _open(self, session: Session, data: bytes) -> None:
        session.feed(data)
        if session.handshake():
            record = memoryview(bytearray(RECORD_BYTES))
            while got := session.read_into(record):
                self.incoming += record[:got]
        self._sealed += session.take()  # the handshake's answer

    def last_word(self, reason: str) -> None:
        """Tell who fails under TLS why, if it goes at once: by TLS's own alert, or in the clear to who speaks no TLS."""
        if self.session is not None and not self._sealed:
            self._sealed += self.session.take()
        if not self._sealed:
            self.outgoing.clear()
            self.send(Kind.REFUSED, {"reason": reason})
        with contextlib.suppress(OSError):
            self.socket.send(self._sealed or self.outgoing)

    def messages(self) -> Iterator[tuple[Kind, dict[str, Any]]]:
        """The complete messages read so far.

        Raises:
            ProtocolError: what has been read does not parse.
        """
        sender = f"cluster {self.cluster!r}" if self.cluster else "a stranger at the door"
        while len(self.incoming) >= HEADER_BYTES and not self.refused:
            frame = Frame.parse(self.incoming, sender=sender, limit=LIMIT_BYTES)
            end = HEADER_BYTES + frame.length
            if len(self.incoming) < end:
                return
            payload = bytes(self.incoming[HEADER_BYTES:end])
            frame.verify(payload, sender=sender)
            del self.incoming[:end]
            yield frame.kind, parse_note(payload, frame.kind.name, sender)
