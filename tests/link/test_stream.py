"""Streams: messages over chunks, whatever their sizes; hostile chunks are refused before they cost anything."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.errors import ChannelLost, ProtocolError
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.stream import Stream
from paddlenlp_nebula.transport.channel import Channel
from paddlenlp_nebula.transport.loopback import loopback_pair


def frame_for(payload: bytes, kind: Kind = Kind.BUCKET, **fields: int) -> Frame:
    return Frame(kind, len(payload), checksum=checksum(payload), **fields)


def push(stream: Stream, payload: bytes, **fields: int) -> None:
    stream.push(frame_for(payload, **fields), payload)


def drain(stream: Stream) -> list[bytes]:
    """The messages that can be had now."""
    found = []
    stream.pump()
    while (message := stream.message()) is not None:
        found.append(bytes(message.payload))
        stream.consume()
        stream.pump()
    return found


def put(channel: Channel, data: bytes) -> None:
    """One chunk, whatever is in it."""
    chunk = channel.reserve()
    assert chunk is not None
    chunk[: len(data)] = data
    channel.commit(len(data))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=12), st.sampled_from([45, 64, 100, 1000]), st.integers(1, 4))
def test_messages_of_any_size_come_whole_and_in_order(lengths: list[int], chunk_bytes: int, chunks: int) -> None:
    a, b = loopback_pair("a", "b", chunk_bytes, chunks)
    west, east = Stream(a), Stream(b)
    rng = random.Random(0)
    there, back = ([rng.randbytes(length) for length in lengths] for _ in range(2))
    for stream, messages in ((west, there), (east, back)):
        for number, payload in enumerate(messages):
            push(stream, payload, part=number)
    got: dict[str, list[bytes]] = {"west": [], "east": []}
    for _ in range(1000):
        got["west"] += drain(west)
        got["east"] += drain(east)
        if west.idle() and east.idle() and len(got["west"]) == len(got["east"]) == len(lengths):
            break
    assert got == {"west": back, "east": there}


def test_a_message_that_fits_into_a_chunk_is_read_in_place() -> None:
    a, b = loopback_pair("a", "b", 1024, 1)
    west, east = Stream(a), Stream(b)
    push(west, b"x" * (1024 - HEADER_BYTES))
    east.pump()
    message = east.message()
    assert message is not None
    assert message.payload.readonly
    assert not west.room_for(0)  # the only chunk is still being read
    east.consume()
    assert west.room_for(1024 - HEADER_BYTES)
    assert not west.room_for(1024 - HEADER_BYTES + 1)
    with pytest.raises(ValueError, match="released"):
        message.payload[0]


def pass_on(west: Stream, east: Stream) -> list[bytes]:
    """Move messages from west to east until none is left, or something is wrong."""
    found = []
    while not west.idle() or east.channel.peek() is not None:
        west.pump()
        found += drain(east)
    return found


def test_a_queued_payload_is_referred_to_and_sent_later() -> None:
    a, b = loopback_pair("a", "b", 100, 1)
    west, east = Stream(a), Stream(b)
    payload = bytearray(1000)
    push(west, payload)
    assert not west.idle()
    payload[-1] = 7  # the caller changes what it had been told to leave alone
    with pytest.raises(ProtocolError, match="does not match its checksum"):
        pass_on(west, east)


def test_loss_comes_after_the_last_message() -> None:
    a, b = loopback_pair("a", "b", 100, 8)
    west, east = Stream(a), Stream(b)
    push(west, b"one")
    push(west, b"two" * 50)
    a.close()
    for wanted in (b"one", b"two" * 50):
        east.pump()
        message = east.message()
        assert message is not None
        assert message.payload == wanted
        east.consume()
    with pytest.raises(ChannelLost):
        east.pump()


HEAD = frame_for(b"x" * 200).pack()


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([b"GET / HTTP/1.1\r\nHost: nebula.example.org\r\n\r\n"], "is something else using this address"),
        ([b"NEB1"], "must start with 44 header bytes, got 4"),
        ([Frame(Kind.BUCKET, 2**60).pack()], "announces 1152921504606846976 bytes, the limit is"),
        ([Frame(Kind.NOTE, 1 << 20).pack()], "a NOTE frame from cluster 'b' announces 1048576 bytes"),
        ([frame_for(b"abc").pack() + b"abcd"], "must end with its chunk, got 1 bytes more"),
        ([frame_for(b"abc").pack() + b"abx"], "does not match its checksum"),
        ([HEAD, b"x" * 150, b"x" * 51], "must hold 200 bytes, got more"),
        ([HEAD, b"x" * 150, b"y" * 50], "does not match its checksum"),
    ],
)
def test_hostile_chunks_are_refused(chunks: list[bytes], sentence: str) -> None:
    a, b = loopback_pair("a", "b", 256, 8)
    for chunk in chunks:
        put(b, chunk)
    stream = Stream(a)
    with pytest.raises(ProtocolError, match=sentence):
        stream.pump()
    assert stream.message() is None
    with pytest.raises(ProtocolError):  # and it stays refused
        stream.pump()


@pytest.mark.parametrize("length", [2**40, 2**60, (64 << 20) + 1])
def test_nothing_is_allocated_before_the_length_is_checked(length: int) -> None:
    a, b = loopback_pair("a", "b", 256, 8)
    put(b, Frame(Kind.BUCKET, length).pack())
    stream = Stream(a)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        stream.pump()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10
