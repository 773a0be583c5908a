"""The records that a leader and its courier pass through their Unix socket; payload stays in shared memory.

One record per packet: a fixed header and, for few kinds, a short text. The courier faces an untrusted
network, so the leader checks what it says as if it came from there.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from enum import IntEnum
from typing import NamedTuple

from ..errors import ProtocolError

__all__ = ["TEXT_BYTES", "Doorbell", "Kind", "Record", "pack", "unpack"]

TEXT_BYTES = 1024
_HEADER = struct.Struct("<BxHIQ")  # kind, bytes of text, slot, number


class Kind(IntEnum):
    """What a record says. In brackets: who says it, and the meaning of slot, number and text."""

    HELLO = 1  # (courier; text: the token that proves who started it)
    SETUP = 2  # (leader; slot: chunks per direction, number: chunk_bytes, text: mpiexec's pid and the peer's name;
    # memory attached, and credentials for TLS)
    OPEN = 3  # (leader) open an MPI port
    PORT = 4  # (courier; text: the port)
    ACCEPT = 5  # (leader; number: milliseconds)
    CONNECT = 6  # (leader; text: the port)
    CONNECTED = 7  # (courier)
    SEND = 8  # (leader; slot, number: bytes)
    SENT = 9  # (courier; slot, number: microseconds so far in which chunks were on their way)
    RECEIVED = 10  # (courier; slot, number: bytes)
    FREE = 11  # (leader; slot)
    LOST = 12  # (courier; text: why)
    NOTE = 13  # (courier; text: a sentence for the log)


_KINDS = {int(kind): kind for kind in Kind}


class Record(NamedTuple):
    """One packet."""

    kind: Kind
    slot: int = 0
    number: int = 0
    text: str = ""


def pack(record: Record) -> bytes:
    """The packet of a record; a text that is too long is cut."""
    text = record.text.encode(errors="replace")[:TEXT_BYTES]
    return _HEADER.pack(record.kind, len(text), record.slot, record.number) + text


def unpack(packet: bytes) -> Record:
    """The record in a packet.

    Raises:
        ProtocolError: it does not have the fixed layout.
    """
    if len(packet) < _HEADER.size:
        raise ProtocolError(f"a courier's record has at least {_HEADER.size} bytes, got {len(packet)}")
    kind, length, slot, number = _HEADER.unpack_from(packet)
    if kind not in _KINDS or length > TEXT_BYTES or len(packet) != _HEADER.size + length:
        raise ProtocolError(f"a courier's record of kind {kind} with {len(packet)} bytes is not one of ours")
    return Record(_KINDS[kind], slot, number, packet[_HEADER.size :].decode(errors="replace"))


class Doorbell:
    """A non-blocking packet socket that keeps what the kernel does not take yet (bounded by the rings)."""

    def __init__(self, packets: socket.socket) -> None:
        packets.setblocking(False)
        self.socket = packets
        self.closed = False
        self._waiting: deque[bytes] = deque()

    def post(self, record: Record) -> None:
        """Send a record, now or at the next ``flush``."""
        self._waiting.append(pack(record))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; whether all of it has gone."""
        try:
            while self._waiting:
                self.socket.send(self._waiting[0], socket.MSG_NOSIGNAL)
                self._waiting.popleft()
        except BlockingIOError:
            return False
        except OSError:  # the other side has gone: reading says so, after what it had written
            self._waiting.clear()
        return True

    def read(self) -> Record | None:
        """The next record, or None; then ``closed`` tells whether there can be any more.

        Raises:
            ProtocolError: a packet does not have the fixed layout.
        """
        try:
            packet = self.socket.recv(_HEADER.size + TEXT_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            self.closed = True
            return None
        return unpack(packet)

    def close(self) -> None:
        self.closed = True
        self.socket.close()
