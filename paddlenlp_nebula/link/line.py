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

__all__ = ["LIMIT_BYTES", "Line"]

LIMIT_BYTES = 16 << 10
"""Longest payload of a message at the door."""


@dataclass(eq=False)
class Line:
    """One TCP connection and its unfinished bytes.

    Attributes:
        socket: the connection.
        cluster: who is at the other end; None until it has knocked.
        since: when it came, monotonic seconds.
        refused: it has been turned away and leaves as soon as it has been told.
    """

    socket: socket.socket
    cluster: str | None = None
    since: float = field(default_factory=time.monotonic)
    refused: bool = False
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)

    def send(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Queue a message."""
        payload = pack_note(body)
        self.outgoing += Frame(kind, len(payload), checksum=checksum(payload)).pack() + payload

    def flush(self) -> None:
        """Send what the connection takes."""
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]

    def fill(self) -> None:
        """Read what is there; raises EOFError when the other side has closed."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(LIMIT_BYTES)
            if not data:
                raise EOFError
            self.incoming += data

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
