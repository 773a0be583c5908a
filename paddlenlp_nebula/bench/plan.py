"""What the two processes of a link measurement are told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["MESSAGE_BYTES", "NAMES", "Plan"]

NAMES = ("west", "east")

MESSAGE_BYTES = 4 * 63 * 4096
"""Payload of one message: a bucket of fp32 gradients, as in training (not imported, for that would import Paddle)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement.

    Attributes:
        messages: how many messages each side sends in one copy.
        repetitions: how often each copy is made.
        door: "host:port" of the link's door, at the first side.
        socket: "host:port" of the plain socket, at the first side.
        timeout_s: longest silence, seconds.
        certificates: folder with those of both sides (`throw_away`); "" for a plain link.
        omit_s: seconds at the start of each copy that do not count (TCP's slow start).
    """

    messages: int
    repetitions: int
    door: str
    socket: str
    timeout_s: float = 60.0
    omit_s: float = 0.0
    certificates: str = ""

    def text(self) -> str:
        """The plan as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan in such an argument."""
        return cls(**json.loads(text))
