"""The link: everything one leader says to and hears from the other clusters.

All waiting happens in here, in one place (`Link._wait`), with a deadline that every byte from the awaited peer renews.
Whoever waits for one peer shows the others that it is alive, so that the silence of one is not taken for the silence
of all who wait for it. Everything above speaks in messages to *members*: the clusters of the current epoch, in the
configured order, which is also the order of every reduction.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paddlenlp_nebula.errors import ChannelLost, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.departures import Departures
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.link.stream import Message, Stream
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["EpochProposed", "Link"]

_SELECT_S = 0.2  # how often a wait looks up although nothing happened
_POLL_S = 0.0002  # the same for a transport that cannot wake us


class EpochProposed(NebulaError):
    """A member proposes a new member list: the current exchange is void.

    Args:
        peer: the member that proposes.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(f"cluster {peer!r} has lost another cluster while all were starting: start them again")


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
        self._departures = Departures()
        self._unheard = Deadline(timeout_s / 4)  # since the peers have last heard from us
        self._pongs: Counter[str] = Counter()
        self._closed = False

    @property
    def peers(self) -> tuple[str, ...]:
        """The other members, in order."""
        return tuple(name for name in self.members if name != self.cluster)

    @property
    def channels(self) -> dict[str, Channel]:
        """The channel to each other member."""
        return {peer: stream.channel for peer, stream in self._streams.items()}

    @property
    def refusals(self) -> dict[str, int]:
        """Connections that this cluster's door has turned away, by category."""
        return {} if self._door is None else self._door.refusals()

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

    def room_for(self, length: int) -> bool:
        """Whether a payload of ``length`` bytes would leave for every peer at once."""
        return all(self._streams[peer].room_for(length) for peer in self.peers)

    def flush(self) -> None:
        """Wait until nothing posted needs this process any more: it is in memory that travels by itself.

        Raises:
            PeerLost: a peer takes nothing for ``timeout_s``.
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
                    self._check(peer, deadline, "took nothing")
                    self._wait(deadline, peer)

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
            PeerLost: the peer is gone, silent for ``timeout_s``, or sent what does not parse: a
                ProtocolError inside the ``with`` block becomes this.
            NebulaError: it sent a proper message of another exchange: the clusters do different things.
            EpochProposed: it proposes a new member list instead.
        """
        message = self._await(peer, while_waiting)
        frame = message.frame
        if frame.kind is Kind.EPOCH:
            raise EpochProposed(peer)
        with self._consuming(peer):
            if (frame.kind, frame.round, frame.part) != (kind, round, part):
                raise NebulaError(
                    f"cluster {self.cluster!r} expected {kind.name} (round {round}, part {part}) from cluster {peer!r}, "
                    f"got {frame.kind.name} (round {frame.round}, part {frame.part}): do both run the same release and "
                    "the same script, and evaluate at the same steps?"
                )
            yield message

    @contextlib.contextmanager
    def receive_epoch(self, peer: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The peer's next proposal of a member list, and the epoch it works under.

        What it sent before that is void and skipped.

        Raises:
            PeerLost: as for `receive`.
        """
        while (message := self._await(peer)).frame.kind is not Kind.EPOCH:
            self._consume(peer)
        with self._consuming(peer):
            yield message.frame.epoch, _note(message, peer)

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
                    if self._pongs[peer] == seen:  # or the answer would be taken for as late as the next event
                        self._check(peer, deadline, "sent nothing")
                        self._wait(deadline, peer)
                taken = time.perf_counter() - start
                self.rtt_s[peer] = min(taken, self.rtt_s.get(peer, taken))

    def departures(self) -> dict[str, PeerLost]:
        """Members that have said goodbye or died, as far as is known without waiting."""
        self._pump()
        return {peer: self._departures[peer] for peer in self.peers if peer in self._departures}

    def losses(self) -> dict[str, PeerLost]:
        """The clusters that are no longer members, and why."""
        return {peer: self._departures[peer] for peer in self._departures if peer not in self.members}

    def drop(self, loss: PeerLost) -> None:
        """Take a peer out of the members and free what belongs to it; tell it why, in case it is still there."""
        peer = loss.peer
        self._departures.ended(peer, loss.reason, deliberate=loss.deliberate)
        if not loss.deliberate:
            self._say_goodbye(f"it goes on without this cluster: {loss.reason}", deliberate=False, to=[peer])
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
        self._say_goodbye(reason, deliberate=deliberate, at_the_door=not deliberate)
        deadline = Deadline(linger_s)
        while not deadline.passed():
            for peer in self.peers:  # whatever they still say does not matter any more
                while self._next(peer) is not None:
                    self._consume(peer)
            waiting = [peer for peer in self.peers if peer not in self._departures]
            if not deliberate:
                waiting = [peer for peer in waiting if not self._streams[peer].idle()]
            if not waiting:
                break
            self._wait(deadline)
        if deliberate:  # only now: by this way it would overtake what is still in flight
            self._say_goodbye(reason, deliberate=True, in_the_channel=False)
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

    def _say_goodbye(
        self,
        reason: str,
        *,
        deliberate: bool,
        to: Sequence[str] | None = None,
        in_the_channel: bool = True,
        at_the_door: bool = True,
    ) -> None:
        body = {"reason": reason[:2000], "deliberate": deliberate}
        if in_the_channel:
            self.post(Kind.LEAVE, pack_note(body), to=to)
        if at_the_door and self._door is not None:
            for peer in self.peers if to is None else to:
                self._door.send(Kind.LEAVE, peer, body)

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
            self._wait(deadline, peer)
        return message

    def _next(self, peer: str) -> Message | None:
        """The peer's oldest message that is for somebody above."""
        self._pump()
        stream = self._streams.get(peer)
        return None if stream is None else stream.message()

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
        for peer, stream in self._streams.items():
            try:
                stream.pump()
                while (message := stream.message()) is not None and self._is_ours(peer, message):
                    self._consume(peer)
                    stream.pump()
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
            note = _note(message, peer)
            self._departures.said_goodbye(peer, str(note.get("reason")), deliberate=bool(note.get("deliberate")))
        elif frame.kind is not Kind.WAITING:
            return frame.kind is not Kind.EPOCH and frame.epoch < self.epoch
        return True

    def _check(self, peer: str, deadline: Deadline, did: str) -> None:
        if (lost := self._departures.final(peer)) is not None:
            raise lost
        if peer not in self._streams:
            raise PeerLost(peer, "it is not connected")
        if deadline.passed():
            self._departures.ended(
                peer, f"it {did} for {deadline.timeout_s:g} s (sync_timeout_s) although its connection is open"
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


def _note(message: Message, peer: str) -> dict[str, Any]:
    return parse_note(message.payload, message.frame.kind.name, f"cluster {peer!r}")
