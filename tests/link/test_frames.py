"""Frames: what is packed parses, and nothing else does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTE_BYTES, Frame, Kind, checksum

LONG_KINDS = {Kind.PARAMETERS, Kind.ROUND, Kind.BUCKET, Kind.DIGESTS, Kind.QUESTION, Kind.ANSWER}
EMPTY_KINDS = {Kind.PING, Kind.PONG, Kind.WAITING, Kind.END, Kind.VOTE}

frames = st.builds(
    Frame,
    kind=st.sampled_from(sorted(LONG_KINDS)),
    length=st.integers(0, MAX_PAYLOAD_BYTES),
    epoch=st.integers(0, 2**32 - 1),
    round=st.integers(0, 2**64 - 1),
    part=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 2**16 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(frames)
def test_round_trip(frame: Frame) -> None:
    packed = frame.pack()
    assert len(packed) == HEADER_BYTES == 44
    assert Frame.parse(packed, sender="us") == frame
    assert Frame.parse(memoryview(packed + b"payload"), sender="us") == frame


@given(st.binary(max_size=64))
def test_noise_never_parses(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a frame from cluster 'b'"):
        Frame.parse(data, sender="cluster 'b'")


GOOD = Frame(Kind.BUCKET, 3, 1, 2, 3, 4, 5).pack()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "must start with 44 header bytes, got 0"),
        (GOOD[:43], "must start with 44 header bytes, got 43"),
        (b"HTTP" + GOOD[4:], "must start with b'NEB1' (protocol version 1), got b'HTTP'"),
        (GOOD[:-1] + b"\1", "must start with b'NEB1'"),
        (GOOD[:4] + b"\x03\xe7" + GOOD[6:], "has the unknown kind 999"),
        (GOOD[:4] + b"\0\0" + GOOD[6:], "has the unknown kind 0"),
        (Frame(Kind.BUCKET, 2**60).pack(), f"announces {2**60} bytes, the limit is {MAX_PAYLOAD_BYTES}"),
        (Frame(Kind.BUCKET, 2**64 - 1).pack(), "the limit is"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        Frame.parse(data, sender="b")


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_its_limit(kind: Kind) -> None:
    limit = MAX_PAYLOAD_BYTES if kind in LONG_KINDS else 0 if kind in EMPTY_KINDS else NOTE_BYTES
    assert Frame.parse(Frame(kind, limit).pack(), sender="b").length == limit
    with pytest.raises(ProtocolError, match=f"a {kind.name} frame from b announces {limit + 1} bytes"):
        Frame.parse(Frame(kind, limit + 1).pack(), sender="b")
    with pytest.raises(ProtocolError, match=r"limit is [07]"):
        Frame.parse(Frame(kind, 8).pack(), sender="b", limit=7)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_finds_every_flipped_bit(payload: bytes, data: st.DataObject) -> None:
    frame = Frame(Kind.BUCKET, len(payload), round=3, part=1, checksum=checksum(payload))
    frame.verify(payload, sender="b")
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=r"the payload of a BUCKET frame from b \(round 3, part 1"):
        frame.verify(damaged, sender="b")
