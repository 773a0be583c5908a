"""The first words of two ends of a channel: same release, same size of chunks, and meant for each other."""

from __future__ import annotations

import hmac
import struct

from ..errors import ProtocolError

__all__ = ["GREETING_BYTES", "TICKET_BYTES", "check_greeting", "pack_greeting"]

TICKET_BYTES = 16
"""A secret of two couriers, from the door: of all that can reach an MPI port, and of all runs with the same certificates,
only the one that is meant has it."""

_GREETING = struct.Struct(f"<8sQ{TICKET_BYTES}s")
_MAGIC = b"nebula\x00\x02"
GREETING_BYTES = _GREETING.size


def pack_greeting(chunk_bytes: int, ticket: bytes = bytes(TICKET_BYTES)) -> bytes:
    """The greeting of an end with chunks of that capacity."""
    return _GREETING.pack(_MAGIC, chunk_bytes, ticket)


def check_greeting(
    theirs: bytes | bytearray | memoryview, chunk_bytes: int, ticket: bytes = bytes(TICKET_BYTES)
) -> None:
    """Compare the other end's greeting with ours.

    Raises:
        ProtocolError: the ends do not fit together.
    """
    if len(theirs) != GREETING_BYTES or not bytes(theirs).startswith(_MAGIC):
        raise ProtocolError("the other end speaks another version; install the same paddlenlp-nebula on all clusters")
    _, size, token = _GREETING.unpack(theirs)
    if not hmac.compare_digest(token, ticket):
        raise ProtocolError(
            "the other end is not the courier that the door announced, but one of another run or a stranger; start all "
            "clusters again, and let firewalls admit only the other clusters to MPI's ports"
        )
    if size != chunk_bytes:
        raise ProtocolError(f"chunks here have {chunk_bytes} bytes but {size} there; give both the same value")
