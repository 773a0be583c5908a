"""Notes: small JSON objects, the only thing on a link that is not laid out byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paddlenlp_nebula.errors import ProtocolError

__all__ = ["pack_note", "parse_note"]


def pack_note(note: Mapping[str, Any]) -> bytes:
    """The bytes of a note."""
    return json.dumps(note).encode()


def parse_note(payload: bytes | bytearray | memoryview, kind: str, sender: str) -> dict[str, Any]:
    """The note that a payload of checked length holds.

    Args:
        payload: the bytes.
        kind: what the message is, for the error's sentence.
        sender: who sent it, for the error's sentence.

    Raises:
        ProtocolError: it is not a JSON object, or one nested without end.
    """
    try:
        note = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a {kind} message from {sender} must be JSON, got {bytes(payload[:40])!r}") from error
    if not isinstance(note, dict):
        raise ProtocolError(f"a {kind} message from {sender} must be a JSON object, got {note!r:.80}")
    return note
