"""The streams under a link: bytes to and from every peer, and who is gone.

All waiting happens in here, in one place (`Streams._wait`), with a deadline that every byte from the awaited peer, and
every chunk that it takes, renews. Whoever waits for one peer shows the others that it is alive, so that the silence of
one is not taken for the silence of all who wait for it.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paddlenlp_nebula.errors import ChannelLost, PeerLost, ProtocolError
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.departures import Departures
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.notes import parse_note
from paddlenlp_nebula.link.stream import Message, Stream
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["Streams", "note_of"]

_SELECT_S = 0.2  # how often a wait looks up although nothing happened
_POLL_S = 0.0002  # the same for a transport that cannot wake us
_PORTION = 64  # messages for the link itself that are dealt with at once, however many a peer sends
_FROM_ANY_EPOCH = (Kind.EPOCH, Kind.PRESENT, Kind.INVITE, Kind.ACCEPT)


class Streams:
    """One stream to each cluster that can be spoken to, driven by whoever waits; see `Link`, which is what others use."""

    def __init__(
        self,
        cluster: str,
        clusters: Sequence[str],
        channels: Mapping[str, Channel],
        *,
        timeout_s: float,
        door: Door | None = None,
    ) -> None:
        self.cluster = cluster
        self.clusters = tuple(clusters)
        self.members = tuple(name for name in clusters if name == cluster or name in channels)
        self.epoch = 0
        self.timeout_s = timeout_s
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()
        self.seconds_waiting = 0.0
        self.rtt_s: dict[str, float] = {}
        self.on_wait: Callable[[], None] = lambda: None
        self._door = door
        self._streams = {name: Stream(channel) for name, channel in channels.items()}
        self._departures = Departures()
        self._unheard = Deadline(timeout_s / 4)  # since the peers have last heard from us
        self._pongs: Counter[str] = Counter()
        self._behind: set[str] = set()  # whose next message has not been looked at
        self._closed = False

    @property
    def peers(self) -> tuple[str, ...]:
        """The other members, in order."""
        return tuple(name for name in self.members if name != self.cluster)

    # Sending

    def post(
        self,
        kind: Kind,
        payload: bytes | bytearray | memoryview = b"",
        *,
        round: int = 0,
        part: int = 0,
        flags: int = 0,
        to: Sequence[str] | None = None,
    ) -> None:
        """Send one message to all peers (or those named), without waiting.

        ``payload`` must stay as it is until the next `flush`, unless there was `room_for` it.
        """
        view = memoryview(payload).cast("B")
        frame = Frame(kind, len(view), self.epoch, round, part, flags, checksum(view))
        if to is None:
            self._unheard.renew()
        for peer in self.peers if to is None else to:
            if peer in self._streams:
                self._streams[peer].push(frame, view)
                self.bytes_sent[kind.name] += HEADER_BYTES + len(view)

    def room_for(self, length: int, to: Sequence[str] | None = None) -> bool:
        """Whether a payload of ``length`` bytes would leave for every peer (or those named) at once."""
        return all(self._streams[peer].room_for(length) for peer in (self.peers if to is None else to))

    def flush(self) -> None:
        """Wait until nothing posted needs this process any more: it is in memory that travels by itself.

        Raises:
            PeerLost: a peer takes nothing for ``timeout_s``, or will never take anything more.
        """
        for peer in self.peers:
            stream = self._streams[peer]
            sent = stream.channel.bytes_sent
            deadline = Deadline(self.timeout_s)
            while not stream.settled():
                self._pump()
                if stream.channel.bytes_sent != sent:
                    sent = stream.channel.bytes_sent
                    deadline.renew()
                if not stream.settled():
                    if (loss := stream.channel.loss) is not None:  # whatever of its messages may still be unread
                        self._departures.ended(peer, loss)
                    self._check(peer, deadline, "took nothing")
                    self._wait(deadline, peer)

    # Inside

    def _await(
        self, peer: str, while_waiting: Callable[[], None] = lambda: None, timeout_s: float | None = None
    ) -> Message:
        deadline = Deadline(self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s))
        heard = -1
        while (message := self._next(peer)) is None:
            while_waiting()
            stream = self._streams.get(peer)
            if timeout_s is None and stream is not None:
                channel = stream.channel
                if (moved := channel.bytes_received + channel.bytes_delivered) != heard:
                    heard = moved  # one that still takes in what we have sent has nothing to say yet
                    deadline.renew()
            self._check(peer, deadline, "sent nothing" if timeout_s is None else "gave no answer")
            self._wait(deadline, peer)
        return message

    def _next(self, peer: str) -> Message | None:
        """The peer's oldest message that is for somebody above."""
        self._pump()
        stream = self._streams.get(peer)
        return None if stream is None or peer in self._behind else stream.message()

    def _consume(self, peer: str) -> None:
        stream = self._streams.get(peer)
        if stream is not None and (message := stream.message()) is not None:
            self.bytes_received[message.frame.kind.name] += HEADER_BYTES + message.frame.length
            stream.consume()

    @contextlib.contextmanager
    def _consuming(self, peer: str) -> Iterator[None]:
        """Around the use of a peer's message: it is consumed, and a fault in it is the peer's end."""
        try:
            yield
        except ProtocolError as error:
            raise self._violated(peer, error) from error
        finally:
            self._consume(peer)

    def _violated(self, peer: str, error: ProtocolError) -> PeerLost:
        self._departures.ended(peer, str(error))
        return self._departures[peer]

    def _pump(self) -> None:
        """Move bytes both ways, and deal with all messages that are for the link itself."""
        if self._door is not None:
            for event in self._door.events():
                reason = str(event.body.get("reason"))
                if event.kind is Kind.LEAVE:
                    deliberate = bool(event.body.get("deliberate"))
                    self._departures.said_goodbye(event.cluster, reason, deliberate=deliberate, at_the_door=True)
                elif event.kind is Kind.GONE:
                    self._departures.reported(event.cluster, reason)
        self._behind.clear()
        for peer, stream in self._streams.items():
            try:
                stream.pump()
                for _ in range(_PORTION):
                    if (message := stream.message()) is None or not self._is_ours(peer, message):
                        break
                    self._consume(peer)
                    stream.pump()
                else:
                    self._behind.add(peer)
            except ChannelLost as lost:
                self._departures.ended(peer, lost.reason)
            except ProtocolError as error:
                self._departures.ended(peer, str(error))
                stream.consume()
                stream.channel.close()  # what follows cannot be told apart

    def _is_ours(self, peer: str, message: Message) -> bool:
        """Deal with a ping, a goodbye or a void message; False for one that is for somebody above."""
        frame = message.frame
        if frame.kind is Kind.PING:
            self.post(Kind.PONG, to=[peer])
        elif frame.kind is Kind.PONG:
            self._pongs[peer] += 1
        elif frame.kind is Kind.LEAVE:
            note = note_of(message, peer)
            self._departures.said_goodbye(peer, str(note.get("reason")), deliberate=bool(note.get("deliberate")))
        elif frame.kind is Kind.PRESENT and peer in self.members:
            pass  # it was still a guest when it said so, and will hear that it has been invited
        elif frame.kind is not Kind.WAITING:
            return frame.kind not in _FROM_ANY_EPOCH and frame.epoch < self.epoch
        return True

    def _check(self, peer: str, deadline: Deadline, did: str) -> None:
        if (lost := self._departures.final(peer)) is not None:
            raise lost
        if peer not in self._streams:
            raise PeerLost(peer, "it is not connected")
        if deadline.passed():
            limit = " (sync_timeout_s)" if deadline.timeout_s == self.timeout_s else ""
            self._departures.ended(
                peer, f"it {did} for {deadline.timeout_s:g} s{limit} although its connection is open"
            )
            raise self._departures[peer]

    def _wait(self, deadline: Deadline, awaited: str | None = None) -> None:
        """Sleep until something may have happened; ``awaited`` is the peer that keeps us waiting."""
        if self._unheard.passed():
            self._unheard.renew()
            self.post(Kind.WAITING, to=[peer for peer in self.peers if peer != awaited])
        start = time.perf_counter()
        # The descriptor of a channel that has ended stays readable, and would keep us awake.
        channels = [stream.channel for peer, stream in self._streams.items() if self._departures.final(peer) is None]
        descriptors = [descriptor for channel in channels if (descriptor := channel.fileno()) is not None]
        if len(descriptors) < len(channels):
            time.sleep(_POLL_S)
        else:
            if self._door is not None:
                descriptors.append(self._door.fileno())
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(1000 * min(_SELECT_S, deadline.remaining_s()))
        self.seconds_waiting += time.perf_counter() - start
        self.on_wait()


def note_of(message: Message, peer: str) -> dict[str, Any]:
    """A message's small JSON object."""
    return parse_note(message.payload, message.frame.kind.name, f"cluster {peer!r}")
