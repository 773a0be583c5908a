"""What every transport must do, as functions over channels: run by one member (each its own thread or process).

``channels`` maps peer name -> Channel. All members call the same functions in the same order; every
function leaves the channels empty. A function never blocks in a channel call, only in :func:`pump`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from paddlenlp_nebula.errors import ChannelLost
from paddlenlp_nebula.transport.channel import Channel

DEADLINE_S = 20.0


def wait_until(done: Callable[[], bool], *channels: Channel, deadline_s: float = DEADLINE_S) -> None:
    """Drive ``channels`` until ``done()``."""
    deadline = time.monotonic() + deadline_s
    while not done():
        for channel in channels:
            channel.progress()
        assert time.monotonic() < deadline, "deadline"
        time.sleep(0.0002)


def send(channel: Channel, data: bytes) -> None:
    wait_until(lambda: channel.reserve() is not None, channel)
    view = channel.reserve()
    assert view is not None
    assert len(view) == channel.chunk_bytes
    assert not view.readonly
    view[: len(data)] = data
    channel.commit(len(data))


def receive(channel: Channel) -> bytes:
    wait_until(lambda: channel.peek() is not None, channel)
    view = channel.peek()
    assert view is not None
    assert view.readonly
    data = bytes(view)
    channel.release()
    return data


def barrier(channels: Mapping[str, Channel]) -> None:
    """Everyone has come here: one chunk each way over every channel, then flushed."""
    for channel in channels.values():
        send(channel, b"barrier")
    for channel in channels.values():
        assert receive(channel) == b"barrier"
    for channel in channels.values():  # one by one: a peer that is through may already close its side
        wait_until(channel.flushed, channel)


def exchange(channel: Channel, outgoing: list[bytes], expected: list[bytes]) -> None:
    """Both directions at once, as fast as they go, comparing every chunk as it comes."""
    position = sent = 0

    def step() -> bool:
        nonlocal position, sent
        while sent < len(outgoing) and (view := channel.reserve()) is not None:
            view[: len(outgoing[sent])] = outgoing[sent]
            channel.commit(len(outgoing[sent]))
            sent += 1
        while position < len(expected) and (got := channel.peek()) is not None:
            assert got == expected[position], f"chunk {position} differs"
            channel.release()
            position += 1
        return position == len(expected) and sent == len(outgoing) and channel.flushed()

    wait_until(step, channel)


def chunks_of(seed: int, count: int, lengths: Callable[[random.Random], int]) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(lengths(rng)) for _ in range(count)]


def lengths_and_order(me: str, channels: Mapping[str, Channel]) -> None:
    """Lengths 1..chunk_bytes arrive in order, and the counters say how many bytes."""
    for peer, channel in channels.items():
        top = channel.chunk_bytes
        sizes = [1, 2, 3, 7, top // 2, top - 1, top, 1, top, 1]
        outgoing = [bytes([i + len(me)]) * size for i, size in enumerate(sizes)]
        expected = [bytes([i + len(peer)]) * size for i, size in enumerate(sizes)]
        before = channel.bytes_sent, channel.bytes_received
        exchange(channel, outgoing, expected)
        assert channel.bytes_sent - before[0] == sum(sizes)
        assert channel.bytes_received - before[1] == sum(sizes)
    barrier(channels)


def random_lengths(me: str, channels: Mapping[str, Channel], count: int = 120) -> None:
    """Saturated both ways with chunks of mixed sizes (eager and rendezvous messages must not overtake)."""
    for peer, channel in channels.items():

        def length(rng: random.Random, top: int = channel.chunk_bytes) -> int:
            return rng.choice([1, rng.randint(1, min(64, top)), rng.randint(1, top), top])

        exchange(channel, chunks_of(len(me), count, length), chunks_of(len(peer), count, length))
    barrier(channels)


def backpressure(me: str, channels: Mapping[str, Channel], chunks: int) -> None:
    """While the peer keeps its chunks the sender runs out of room, nothing is lost, and it goes on afterwards."""
    for peer, channel in sorted(channels.items()):
        for size in (1, channel.chunk_bytes):
            for sender in sorted((me, peer)):
                _press(channel, size, chunks) if sender == me else _hold_then_read(channel, size)
    barrier(channels)


def _press(channel: Channel, size: int, chunks: int) -> None:
    send(channel, b"ready")
    assert receive(channel) == b"holding"
    began = time.monotonic()
    sent = 0
    was_full = False
    while time.monotonic() - began < 0.25 and sent < 100:
        while (view := channel.reserve()) is not None and sent < 100:
            assert channel.reserve() == view, "asking twice gives the same chunk"
            view[:size] = bytes([sent]) * size
            channel.commit(size)
            sent += 1
        was_full = was_full or channel.free_chunks() == 0
        channel.progress()
        time.sleep(0.001)
    assert was_full
    assert sent >= chunks
    if time.monotonic() - began < 0.4:  # unless the machine was so busy that the holder has let go meanwhile
        assert sent <= 3 * chunks, "the transport buffers more than its chunks"
    send(channel, b"\xff" + bytes([sent]))


def _hold_then_read(channel: Channel, size: int) -> None:
    assert receive(channel) == b"ready"
    send(channel, b"holding")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.5, channel)
    number = 0
    while not (got := receive(channel)).startswith(b"\xff"):
        assert got == bytes([number]) * size
        number += 1
    assert got[1] == number


def mutual_backpressure(me: str, channels: Mapping[str, Channel], chunks: int) -> None:
    """Both sides send more than there is room for, and read only then: nothing is lost, nobody waits for ever."""
    for peer, channel in channels.items():

        def full(_: random.Random, top: int = channel.chunk_bytes) -> int:
            return top

        outgoing = chunks_of(len(me), 4 * chunks, full)
        sent, began = 0, time.monotonic()
        while time.monotonic() - began < 0.25:
            while sent < len(outgoing) and (view := channel.reserve()) is not None:
                view[:] = outgoing[sent]
                channel.commit(len(view))
                sent += 1
            channel.progress()
            time.sleep(0.001)
        assert sent >= chunks
        exchange(channel, outgoing[sent:], chunks_of(len(peer), 4 * chunks, full))
    barrier(channels)


def splitting(me: str, channels: Mapping[str, Channel]) -> None:
    """A stream cut into chunks comes out as the same bytes, whatever chunk_bytes is."""
    for peer, channel in channels.items():
        top = channel.chunk_bytes
        mine, theirs = random.Random(me).randbytes(200_003), random.Random(peer).randbytes(200_003)
        exchange(
            channel,
            [mine[i : i + top] for i in range(0, len(mine), top)],
            [theirs[i : i + top] for i in range(0, len(theirs), top)],
        )
    barrier(channels)


def misuse(me: str, channels: Mapping[str, Channel]) -> None:
    """Wrong calls are refused and change nothing."""
    for channel in channels.values():
        view = channel.reserve()
        assert view is not None
        for wrong in (0, -1, channel.chunk_bytes + 1):
            _refused(partial(channel.commit, wrong))
        view[:1] = b"!"
        channel.commit(1)
        _refused(partial(channel.commit, 1))
        assert receive(channel) == b"!"
        _refused(channel.release)
    barrier(channels)


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError("expected a ValueError")


def run_all(me: str, channels: Mapping[str, Channel], chunks: int) -> None:
    """The whole contract except closing and loss."""
    assert all(peer == channel.peer for peer, channel in channels.items())
    barrier(channels)
    misuse(me, channels)
    lengths_and_order(me, channels)
    random_lengths(me, channels)
    backpressure(me, channels, chunks)
    mutual_backpressure(me, channels, chunks)
    splitting(me, channels)


def close_all(channels: Mapping[str, Channel]) -> None:
    """After :func:`run_all`: the others may close first, and closing twice is fine."""
    for channel in channels.values():
        with suppress(ChannelLost):
            wait_until(channel.flushed, channel)
        channel.close()
        channel.close()
        assert channel.reserve() is None
        assert channel.peek() is None
        assert channel.fileno() is None
