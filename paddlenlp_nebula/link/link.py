"""The link: everything one leader says to and hears from the other clusters.

All waiting happens in here, in one place (`Link._wait`), with a deadline that every byte from the
awaited peer renews. Everything above speaks in messages to *members*: the clusters of the current
epoch, in the configured order, which is also the order of every reduction.
"""

from __future__ import annotations

import contextlib
import json
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paddlenlp_nebula.errors import ChannelLost, PeerLost, ProtocolError
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.stream import Message, Stream
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["EpochProposed", "Link"]

_SELECT_S = 0.2  # how often a wait looks up although nothing happened
_POLL_S = 0.0002  # the same for a transport that cannot wake us
_NOTE_BYTES = 64 << 10


class EpochProposed(Exception):
    """A member proposes a new member list: the current exchange is void."""


class Link:
    """The leader's connection to all other clusters.

    Args:
        cluster: this cluster's name.
        clusters: all names, in the order of reduction.
        channels: a connected channel to each other cluster.
        timeout_s: longest silence of a peer that is waited for, seconds.
        door: reports deaths and carries goodbyes out of band; None for ``world`` and ``loopback``.

    Attributes:
        members: the clusters of this epoch, in order, this one included.
        epoch: number of the member list, from 0.
        bytes_sent, bytes_received: headers and payloads, by message kind.
        seconds_waiting: time spent with nothing to do but wait.
        on_wait: called at least every 0.2 s while waiting (keeps local processes informed).
    """

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
        self._departed: dict[str, PeerLost] = {}
        self._pongs: Counter[str] = Counter()
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
        for peer in self.peers if to is None else to:
            if peer in self._streams:
                self._streams[peer].push(frame, view)
                self.bytes_sent[kind.name] += HEADER_BYTES + len(view)

    def room_for(self, length: int) -> bool:
        """Whether a payload of ``length`` bytes would leave for every peer at once."""
        return all(self._streams[peer].room_for(length) for peer in self.peers)

    def flush(self) -> None:
        """Wait until everything posted has been handed to the network.

        Raises:
            PeerLost: a peer takes nothing for ``timeout_s``.
        """
        for peer in self.peers:
            stream = self._streams[peer]
            sent = stream.channel.bytes_sent
            deadline = Deadline(self.timeout_s)
            while not stream.idle():
                self._pump()
                if stream.channel.bytes_sent != sent:
                    sent = stream.channel.bytes_sent
                    deadline.renew()
                if not stream.idle():
                    self._check(peer, deadline, "took nothing")
                    self._wait(deadline)

    # Receiving

    @contextlib.contextmanager
    def receive(
        self,
        peer: str,
        kind: Kind,
        *,
        round: int = 0,
        part: int = 0,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[Message]:
        """Wait for the next message of a peer, which must be of this kind, round and part.

        The message's payload is valid inside the ``with`` block.

        Raises:
            PeerLost: the peer is gone, or silent for ``timeout_s``.
            ProtocolError: it sent something else.
            EpochProposed: it proposes a new member list instead.
        """
        message = self._await(peer, while_waiting)
        frame = message.frame
        if frame.kind is Kind.EPOCH and kind is not Kind.EPOCH:
            raise EpochProposed
        if (frame.kind, frame.round, frame.part) != (kind, round, part):
            raise ProtocolError(
                f"cluster {self.cluster!r} expected {kind.name} (round {round}, part {part}) from cluster {peer!r}, "
                f"got {frame.kind.name} (round {frame.round}, part {frame.part}): do both run the same release and "
                "the same script?"
            )
        try:
            yield message
        finally:
            self._consume(peer)

    def receive_epoch(self, peer: str) -> dict[str, Any]:
        """The peer's next proposal of a member list; what it sent before that is void and skipped.

        Raises:
            PeerLost: the peer is gone, or silent for ``timeout_s``.
        """
        while True:
            message = self._await(peer)
            try:
                if message.frame.kind is Kind.EPOCH:
                    return _parse_note(message, peer)
            finally:
                self._consume(peer)

    def all_gather(
        self, kind: Kind, round: int, parts: int, produce: Callable[[int], memoryview]
    ) -> Iterator[tuple[int, str, memoryview]]:
        """Exchange ``parts`` messages with every member, pipelined.

        Args:
            kind: kind of the messages.
            round: exchange number.
            parts: how many messages each member sends.
            produce: called with 0, 1, ... as soon as there is room for the part, well before it is
                yielded; the buffer it returns must stay as it is until that part has been yielded.

        Yields:
            (part, member, payload) for each part in turn, and within it for each member in order,
            this cluster included. The payload is valid until the next iteration.
        """
        own: dict[int, memoryview] = {}
        posted = 0

        def fill() -> None:
            nonlocal posted
            while posted < parts and (not own or self.room_for(len(own[posted - 1]))):
                own[posted] = produce(posted)
                self.post(kind, own[posted], round=round, part=posted)
                posted += 1

        for part in range(parts):
            fill()
            for member in self.members:
                if member == self.cluster:
                    yield part, member, own[part]
                else:
                    with self.receive(member, kind, round=round, part=part, while_waiting=fill) as message:
                        yield part, member, message.payload
            del own[part]

    def all_gather_notes(self, note: Mapping[str, Any], *, round: int = 0, kind: Kind = Kind.NOTE) -> dict[str, Any]:
        """Exchange one small JSON object with every member; returns member -> object, in order."""
        payload = json.dumps(note).encode()
        if len(payload) > _NOTE_BYTES:
            raise ProtocolError(f"a note must be at most {_NOTE_BYTES} bytes of JSON, got {len(payload)}")
        self.post(kind, payload, round=round)
        notes: dict[str, Any] = {}
        for member in self.members:
            if member == self.cluster:
                notes[member] = json.loads(payload)
                continue
            with self.receive(member, kind, round=round) as message:
                notes[member] = _parse_note(message, member)
        return notes

    def measure_rtt(self, times: int = 3) -> None:
        """Fill ``rtt_s`` with the shortest of a few round trips to each peer, seconds."""
        for peer in self.peers:
            for _ in range(times):
                seen = self._pongs[peer]
                start = time.perf_counter()
                self.post(Kind.PING, to=[peer])
                deadline = Deadline(self.timeout_s)
                while self._pongs[peer] == seen:
                    if self._next(peer) is not None:
                        return  # it is already further than this: what has been measured must do
                    self._check(peer, deadline, "sent nothing")
                    self._wait(deadline)
                taken = time.perf_counter() - start
                self.rtt_s[peer] = min(taken, self.rtt_s.get(peer, taken))

    def departures(self) -> dict[str, PeerLost]:
        """Members that have said goodbye or died, as far as is known without waiting."""
        self._pump()
        return {peer: lost for peer, lost in self._departed.items() if peer in self.members}

    def drop(self, peer: str) -> None:
        """Take a peer out of the members and free what belongs to it."""
        self.members = tuple(name for name in self.members if name != peer)
        if (stream := self._streams.pop(peer, None)) is not None:
            stream.channel.close()

    def leave(self, reason: str, *, deliberate: bool, linger_s: float = 5.0) -> None:
        """Say goodbye to all peers with the reason, wait a little for theirs, and close.

        Args:
            reason: the end of a sentence, such as "its training is complete".
            deliberate: training is over for everybody's good; False when this cluster failed.
            linger_s: longest wait for what is in flight and for the peers' own goodbyes.
        """
        if self._closed:
            return
        body = json.dumps({"reason": reason[:2000], "deliberate": deliberate}).encode()
        self.post(Kind.LEAVE, body)
        if not deliberate:
            self._tell_at_the_door(reason, deliberate=False)
        deadline = Deadline(linger_s)
        with contextlib.suppress(ProtocolError, EpochProposed):
            while not deadline.passed():
                self._pump()
                for peer in self.peers:  # whatever they still say does not matter any more
                    while self._next(peer) is not None:
                        self._consume(peer)
                waiting = [peer for peer in self.peers if peer not in self._departed]
                if not deliberate:
                    waiting = [peer for peer in waiting if not self._streams[peer].idle()]
                if not waiting:
                    break
                self._wait(deadline)
        if deliberate:  # only now: by this way it would overtake what is still in flight
            self._tell_at_the_door(reason, deliberate=True)
        self.close()

    def close(self) -> None:
        """Free everything without a word. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams.values():
            stream.channel.close()
        if self._door is not None:
            self._door.close()

    # Inside

    def _tell_at_the_door(self, reason: str, *, deliberate: bool) -> None:
        if self._door is not None:
            for peer in self.peers:
                self._door.send(Kind.LEAVE, peer, {"reason": reason[:2000], "deliberate": deliberate})

    def _await(self, peer: str, while_waiting: Callable[[], None] = lambda: None) -> Message:
        deadline = Deadline(self.timeout_s)
        heard = -1
        while (message := self._next(peer)) is None:
            while_waiting()
            stream = self._streams.get(peer)
            if stream is not None and stream.channel.bytes_received != heard:
                heard = stream.channel.bytes_received
                deadline.renew()
            self._check(peer, deadline, "sent nothing")
            self._wait(deadline)
        return message

    def _next(self, peer: str) -> Message | None:
        """The peer's oldest message of this epoch, after dealing with pings and goodbyes."""
        self._pump()
        stream = self._streams.get(peer)
        while stream is not None and (message := stream.message()) is not None:
            kind = message.frame.kind
            if kind is Kind.PING:
                self.post(Kind.PONG, to=[peer])
            elif kind is Kind.PONG:
                self._pongs[peer] += 1
            elif kind is Kind.LEAVE:
                self._depart(peer, _parse_note(message, peer))
            elif message.frame.epoch >= self.epoch or kind is Kind.EPOCH:
                return message
            self._consume(peer)
            self._pump()
        return None

    def _consume(self, peer: str) -> None:
        stream = self._streams.get(peer)
        if stream is not None and (message := stream.message()) is not None:
            self.bytes_received[message.frame.kind.name] += HEADER_BYTES + message.frame.length
            stream.consume()

    def _pump(self) -> None:
        for peer, stream in self._streams.items():
            if peer in self._departed and stream.message() is None:
                with contextlib.suppress(ChannelLost):
                    stream.pump()
                continue
            try:
                stream.pump()
            except ChannelLost as lost:
                self._departed[peer] = PeerLost(peer, lost.reason)
            except ProtocolError as error:
                self._departed[peer] = PeerLost(peer, str(error))
        if self._door is not None:
            for event in self._door.events():
                if event.kind in (Kind.GONE, Kind.LEAVE):
                    self._depart(event.cluster, event.body)

    def _depart(self, peer: str, body: Mapping[str, Any]) -> None:
        lost = PeerLost(peer, str(body.get("reason")), deliberate=bool(body.get("deliberate")))
        self._departed.setdefault(peer, lost)

    def _check(self, peer: str, deadline: Deadline, did: str) -> None:
        if peer in self._departed:
            raise self._departed[peer]
        if peer not in self._streams:
            raise PeerLost(peer, "it is not connected")
        if deadline.passed():
            self._departed[peer] = PeerLost(
                peer, f"it {did} for {deadline.timeout_s:g} s (sync_timeout_s) although its connection is open"
            )
            raise self._departed[peer]

    def _wait(self, deadline: Deadline) -> None:
        start = time.perf_counter()
        descriptors = [
            descriptor for stream in self._streams.values() if (descriptor := stream.channel.fileno()) is not None
        ]
        if len(descriptors) < len(self._streams):
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


def _parse_note(message: Message, sender: str) -> dict[str, Any]:
    kind = message.frame.kind.name
    if message.frame.length > _NOTE_BYTES:
        raise ProtocolError(
            f"a {kind} message from cluster {sender!r} must be at most {_NOTE_BYTES} bytes, got {message.frame.length}"
        )
    try:
        note = json.loads(bytes(message.payload))
    except ValueError as error:
        raise ProtocolError(f"a {kind} message from cluster {sender!r} must be JSON, got something else") from error
    if not isinstance(note, dict):
        raise ProtocolError(f"a {kind} message from cluster {sender!r} must be a JSON object, got {note!r:.80}")
    return note
