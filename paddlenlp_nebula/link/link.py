"""The link: everything one leader says to and hears from the other clusters, in messages to *members*.

Members are the clusters of the current epoch, in the configured order, which is also the order of every reduction.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.link.stream import Message, Stream
from paddlenlp_nebula.link.streams import Streams, note_of
from paddlenlp_nebula.transport.channel import Channel

__all__ = ["EpochProposed", "Link"]


class EpochProposed(NebulaError):
    """A member proposes a new member list: the current exchange is void.

    Args:
        peer: the member that proposes.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(f"cluster {peer!r} has lost another cluster while all were starting: start them again")


class Link(Streams):
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

    @property
    def door(self) -> Door | None:
        """Where clusters that come back are heard of."""
        return self._door

    @property
    def guests(self) -> tuple[str, ...]:
        """Clusters that can be spoken to and are no members, in order."""
        return tuple(name for name in self.clusters if name in self._streams and name not in self.members)

    @property
    def channels(self) -> dict[str, Channel]:
        """The channel to each other cluster that can be spoken to."""
        return {peer: stream.channel for peer, stream in self._streams.items()}

    @property
    def refusals(self) -> dict[str, int]:
        """Connections that this cluster's door has turned away, by category."""
        return {} if self._door is None else self._door.refusals()

    def deliver(self, peer: str, timeout_s: float) -> None:
        """Wait, not for longer than that, until a peer has everything: it is to be dropped, and must see why."""
        deadline = Deadline(timeout_s)
        while not self._streams[peer].idle() and self._departures.final(peer) is None and not deadline.passed():
            self._pump()
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
        timeout_s: float | None = None,
    ) -> Iterator[Message]:
        """Wait for the next message of a peer, which must be of this kind, round and part.

        The message's payload is valid inside the ``with`` block. ``timeout_s`` bounds the whole wait, whatever
        else the peer says meanwhile; otherwise the link's own timeout bounds its silence.

        Raises:
            PeerLost: the peer is gone, silent for ``timeout_s``, or sent what does not parse: a
                ProtocolError inside the ``with`` block becomes this.
            NebulaError: it sent a proper message of another exchange: the clusters do different things.
            EpochProposed: it proposes a new member list instead.
        """
        message = self._await(peer, while_waiting, timeout_s)
        frame = message.frame
        if frame.kind is Kind.EPOCH:
            raise EpochProposed(peer)
        with self._consuming(peer):
            if (frame.kind, frame.round, frame.part) != (kind, round, part):
                raise NebulaError(
                    f"cluster {self.cluster!r} expected {kind.name} (round {round}, part {part}) from cluster {peer!r}, "
                    f"got {frame.kind.name} (round {frame.round}, part {frame.part}): do both run the same release and "
                    "the same script, with the same settings (sync_strategy, sync_lora_merge), and evaluate at the same steps?"
                )
            yield message

    @contextlib.contextmanager
    def next_message(self, peer: str) -> Iterator[Message | None]:
        """A peer's next message, whatever it is, or None if none has come; valid inside the ``with`` block.

        Raises:
            PeerLost: nothing more is to be expected of it; a ProtocolError inside the ``with`` block becomes this, too.
        """
        if (message := self._next(peer)) is None:
            if (lost := self._departures.final(peer)) is not None:
                raise lost
            yield None
        else:
            with self._consuming(peer):
                yield message

    def wait(self, timeout_s: float) -> None:
        """Sleep until something may have happened; 0.2 s at most."""
        self._wait(Deadline(timeout_s))

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
            yield message.frame.epoch, note_of(message, peer)

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
            ours = "it goes on without this cluster"  # which may be what the peer has told us
            reason = loss.reason if loss.reason.startswith(ours) else f"{ours}: {loss.reason}"
            self._say_goodbye(reason, deliberate=False, to=[peer], stays=True)
        self.members = tuple(name for name in self.members if name != peer)
        if (stream := self._streams.pop(peer, None)) is not None:
            stream.channel.close()

    def host(self, guest: str, channel: Channel) -> None:
        """Speak with a cluster that has come back, before it is a member."""
        self._departures.forget(guest)
        self._streams[guest] = Stream(channel)

    def hear(self, guest: str) -> tuple[Kind, dict[str, Any]] | None:
        """A guest's next message (a note), if there is one.

        Raises:
            PeerLost: it is gone again, or sent what does not parse.
        """
        message = self._next(guest)
        if (lost := self._departures.final(guest)) is not None:
            raise lost
        if message is None:
            return None
        with self._consuming(guest):
            return message.frame.kind, note_of(message, guest)

    def dismiss(self, guest: str) -> None:
        """Speak no more with a guest."""
        if (stream := self._streams.pop(guest, None)) is not None:
            stream.channel.close()

    def admit(self, members: Sequence[str], epoch: int) -> None:
        """From here on these are the members (this cluster, and others that can be spoken to)."""
        self.members = tuple(name for name in self.clusters if name in members)
        self.epoch = epoch

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
        stays: bool = False,
    ) -> None:
        """Give the reason to all peers; ``stays``: this cluster goes on, and its real end would still be news."""
        body = {"reason": reason[:2000], "deliberate": deliberate, "stays": stays}
        if in_the_channel:
            self.post(Kind.LEAVE, pack_note(body), to=to)
        if at_the_door and self._door is not None:
            for peer in self.peers if to is None else to:
                self._door.send(Kind.LEAVE, peer, body)
