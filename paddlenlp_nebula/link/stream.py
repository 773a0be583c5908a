"""Messages over a channel's chunks: one peer, both directions, never blocking.

A message is a header and a payload, laid into consecutive chunks from the start of a fresh one.
One that fits into a single chunk is read in place; a longer one is assembled in memory that is
allocated only after its header has been checked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["Message", "Stream"]


@dataclass(frozen=True, slots=True)
class Message:
    """A complete, verified message; ``payload`` is valid until ``Stream.consume``."""

    frame: Frame
    payload: memoryview


class Stream:
    """Sends and receives messages to and from one peer.

    Args:
        channel: where the chunks go.
        limit: longest payload accepted, bytes.
    """

    def __init__(self, channel: Channel, limit: int = MAX_PAYLOAD_BYTES) -> None:
        self.channel = channel
        self.peer = channel.peer
        self._limit = limit
        self._outgoing: deque[tuple[bytes, memoryview]] = deque()
        self._written = 0  # bytes of the first outgoing message that are in chunks already
        self._message: Message | None = None
        self._in_place = False  # the current message lies in the channel's peeked chunk
        self._frame: Frame | None = None  # of a message that is still being assembled
        self._assembly = bytearray()
        self._filled = 0

    def room_for(self, length: int) -> bool:
        """Whether a payload of ``length`` bytes would go into chunks at once, without being queued."""
        chunks = -(-(HEADER_BYTES + length) // self.channel.chunk_bytes)
        return not self._outgoing and self.channel.free_chunks() >= chunks

    def push(self, frame: Frame, payload: bytes | bytearray | memoryview) -> None:
        """Send a message: into chunks as far as there are any, the rest queued.

        A queued payload is referred to, not copied: the caller must not change it until ``idle``
        (or ask ``room_for`` first).
        """
        self._outgoing.append((frame.pack(), memoryview(payload).cast("B")))
        self._send()

    def idle(self) -> bool:
        """Whether everything pushed has been handed to the network."""
        return not self._outgoing and self.channel.flushed()

    def settled(self) -> bool:
        """Whether everything pushed gets there without any more help from this process."""
        return not self._outgoing and (self.channel.autonomous or self.channel.flushed())

    def pump(self) -> None:
        """Move what can be moved, both ways.

        Raises:
            ChannelLost: the channel is gone and every complete message has been consumed.
            ProtocolError: what arrived does not parse.
        """
        self.channel.progress()
        self._receive()
        self._send()

    def message(self) -> Message | None:
        """The oldest complete message, or None."""
        return self._message

    def consume(self) -> None:
        """Done with the current message: its payload becomes invalid."""
        if self._message is not None:
            self._message.payload.release()
            self._message = None
            if self._in_place:
                self._in_place = False
                self.channel.release()

    def _send(self) -> None:
        while self._outgoing:
            chunk = self.channel.reserve()
            if chunk is None:
                return
            header, payload = self._outgoing[0]
            used = 0
            if self._written == 0:
                chunk[:HEADER_BYTES] = header
                used = self._written = HEADER_BYTES
            start = self._written - HEADER_BYTES
            piece = payload[start : start + len(chunk) - used]
            chunk[used : used + len(piece)] = piece
            self.channel.commit(used + len(piece))
            self._written += len(piece)
            if self._written == HEADER_BYTES + len(payload):
                self._outgoing.popleft()
                self._written = 0

    def _receive(self) -> None:
        while self._message is None and (chunk := self.channel.peek()) is not None:
            sender = f"cluster {self.peer!r}"
            if self._frame is None:
                frame = Frame.parse(chunk, sender=sender, limit=self._limit)
                body = chunk[HEADER_BYTES:]
                if len(body) >= frame.length:
                    if len(body) > frame.length:
                        raise ProtocolError(
                            f"a {frame.kind.name} frame from {sender} must end with its chunk, "
                            f"got {len(body) - frame.length} bytes more"
                        )
                    frame.verify(body, sender=sender)
                    self._message, self._in_place = Message(frame, body), True
                    return
                self._frame, self._assembly, self._filled = frame, bytearray(frame.length), 0
            else:
                body = chunk[:]
            self._assemble(body, sender)
            body.release()
            self.channel.release()

    def _assemble(self, body: memoryview, sender: str) -> None:
        frame = self._frame
        assert frame is not None
        if self._filled + len(body) > frame.length:
            raise ProtocolError(
                f"a {frame.kind.name} frame from {sender} must hold {frame.length} bytes, got more: "
                "its chunks do not add up"
            )
        self._assembly[self._filled : self._filled + len(body)] = body
        self._filled += len(body)
        if self._filled == frame.length:
            frame.verify(self._assembly, sender=sender)
            self._message, self._frame = Message(frame, memoryview(self._assembly).toreadonly()), None
