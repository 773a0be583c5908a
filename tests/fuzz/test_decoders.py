"""Fuzzing of everything that reads bytes from a peer: it is refused in our own words, or means something; nothing else.

A short run by default; ``make fuzz`` takes ten minutes (NEBULA_FUZZ_S is the time for each target).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.codec.codec import Layout
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import PeerLost, ProtocolError, SecurityError
from paddlenlp_nebula.link.admission import arrivals, run_facts
from paddlenlp_nebula.link.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.membership import _Proposal
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.link.returns import Returns
from paddlenlp_nebula.link.stream import Stream
from paddlenlp_nebula.privacy.masks import Masks, read_key
from paddlenlp_nebula.security.certificates import (
    Authority,
    new_key,
    new_request,
    new_signing_key,
    pem,
    read_request,
)
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.manifest import MANIFEST
from paddlenlp_nebula.security.signing import sign_folder, verify_folder
from paddlenlp_nebula.strategy.history import History
from paddlenlp_nebula.strategy.introduction import Introduction
from paddlenlp_nebula.strategy.opening import Opening
from paddlenlp_nebula.transport import doorbells, sealed
from paddlenlp_nebula.transport.greeting import check_greeting, pack_greeting
from paddlenlp_nebula.transport.loopback import loopback_pair
from tests.codec.table import SPECS, encoded, named
from tests.security.certificates import Site
from tests.transport.sealing import End, join

BUDGET_S = float(os.environ.get("NEBULA_FUZZ_S", "0.5"))

pytestmark = pytest.mark.timeout(60 + 3 * BUDGET_S)

fuzz = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def for_a_while(check: Callable[[], Any]) -> None:
    """Again and again with other random numbers, until the time is over."""
    end = time.monotonic() + BUDGET_S
    while True:
        check()
        if time.monotonic() > end:
            return


Edit = tuple[str, float, int, bytes]
WORDS = (b"\xff" * 8, bytes(8), b"\x10" + bytes(7), b"\x7f" + b"\xff" * 7)

edits = st.lists(
    st.tuples(
        st.sampled_from(("byte", "word", "cut", "insert", "repeat")),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
        st.binary(max_size=40),
    ),
    max_size=6,
)
"""What to do to bytes, whatever they are."""


def damage(good: bytes, changes: list[Edit]) -> bytes:
    """Good bytes, some of which are changed, missing, or too many."""
    data = bytearray(good)
    for what, where, number, inserted in changes:
        at = int(where * len(data))
        if what == "byte":
            data[at : at + 1] = bytes([number])
        elif what == "word":
            data[at : at + 8] = WORDS[number % len(WORDS)]
        elif what == "cut":
            del data[at : at + 1 + number % 40]
        elif what == "insert":
            data[at:at] = inserted
        else:
            data += data[at:]
    return bytes(data)


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    return edits.map(lambda changes: damage(good, changes))


def framed(kind: Kind, payload: bytes, **fields: int) -> bytes:
    return Frame(kind, len(payload), checksum=checksum(payload), **fields).pack() + payload


def test_headers() -> None:
    @fuzz
    @given(damaged(Frame(Kind.BUCKET, 100, 1, 2, 3, 4, 5).pack()) | st.binary(max_size=60))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            assert Frame.parse(data, sender="x").length <= MAX_PAYLOAD_BYTES

    for_a_while(check)


def test_streams() -> None:
    good = framed(Kind.NOTE, b'{"a": 1}'), framed(Kind.BUCKET, bytes(range(200)) * 3, round=7), framed(Kind.END, b"")

    @fuzz
    @given(st.lists(st.sampled_from(good).flatmap(damaged), min_size=1, max_size=6), st.integers(45, 300))
    def check(messages: list[bytes], chunk_bytes: int) -> None:
        ours, theirs = loopback_pair("a", "b", chunk_bytes, 64)
        stream = Stream(ours)
        for message in messages:
            for at in range(0, len(message), chunk_bytes):
                if (chunk := theirs.reserve()) is None:
                    break
                piece = message[at : at + chunk_bytes]
                chunk[: len(piece)] = piece
                theirs.commit(len(piece))
        with contextlib.suppress(ProtocolError):
            for _ in range(200):
                stream.pump()
                if (found := stream.message()) is not None:
                    found.frame.verify(found.payload, sender="b")
                    stream.consume()
        for channel in (ours, theirs):
            channel.close()

    for_a_while(check)


def test_what_clusters_that_come_back_say() -> None:
    facts = {"takes_back": True, "max_steps": 9}
    past = [[1, "d1", 10.5], [2, "d2", 20.0]]
    good = {
        "members": ["west", "east"],
        "number": 7,
        "epoch": 3,
        "run": facts,
        "arrived": ["west"],
        "step": 7,
        "turns": 3,
        "fields": {"max_steps": 9},
        "work": 20.5,
        "history": past,
        "diverged": False,
    }
    clusters = ("west", "east", "north")
    values = st.sampled_from(
        (None, -1, 1 << 70, 10**400, 1.5, float("nan"), float("inf"), "x", [], {}, [["west"]], True)
    )
    changed = st.dictionaries(st.sampled_from(sorted(good)), values, max_size=3)
    payloads = damaged(pack_note(good)) | changed.map(lambda changes: pack_note({**good, **changes}))

    @fuzz
    @given(payloads, st.sampled_from((Kind.PRESENT, Kind.INVITE, Kind.ACCEPT)))
    def check(payload: bytes, kind: Kind) -> None:
        with contextlib.suppress(ProtocolError):
            note = parse_note(payload, "NOTE", "x")
            guests: Any = SimpleNamespace(
                _link=SimpleNamespace(clusters=clusters, cluster="east"), _present={}, _invitations={}
            )
            for decode in (
                lambda: Returns._hear(guests, "west", kind, note),
                lambda: Introduction.parse(note, "x"),
                lambda: History().restore({"work": note.get("work"), "recent": note.get("history"), "pinned": []}),
                lambda: run_facts(note),
                lambda: arrivals(note, clusters),
            ):
                with contextlib.suppress(ProtocolError):
                    decode()
            assert all("west" in group.members and 0 <= group.number < 1 << 63 for group in guests._present.values())
            assert all(0 <= invitation.epoch < 1 << 32 for invitation in guests._invitations.values())

    for_a_while(check)


def test_notes() -> None:
    good = pack_note({"cluster": "west", "clusters": ["west", "east"], "protocol": 1, "x": {"y": [1.5, None, True]}})

    @fuzz
    @given(damaged(good) | st.binary(max_size=300) | st.integers(1, 20_000).map(lambda n: b"[" * n))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            assert isinstance(parse_note(data, "NOTE", "x"), dict)

    for_a_while(check)


def test_lines() -> None:
    good = framed(Kind.KNOCK, pack_note({"cluster": "east", "clusters": ["west", "east"], "protocol": 1})) * 2

    @fuzz
    @given(damaged(good))
    def check(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(data)
            theirs.close()
            line = Line(ours)
            with contextlib.suppress(ProtocolError, EOFError):
                while True:
                    line.fill()
                    for kind, body in line.messages():
                        assert isinstance(kind, Kind)
                        assert isinstance(body, dict)

    for_a_while(check)


def test_proposals() -> None:
    link = SimpleNamespace(clusters=("west", "east", "north"), epoch=3)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(link.clusters),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=12,
    )

    @fuzz
    @given(
        st.fixed_dictionaries({}, optional=dict.fromkeys(("members", "committed", "lost"), values)),
        st.integers(0, 2**32 - 1),
    )
    def check(note: dict[str, Any], epoch: int) -> None:
        with contextlib.suppress(ProtocolError):
            found = _Proposal.parse(note, epoch, "east", link, 5)  # type: ignore[arg-type]
            assert set(found.members) <= set(link.clusters)

    for_a_while(check)


def test_openings() -> None:
    good = Opening(4, 2.0, 7, 0.5, (1, 2, 3), b"\xf0\x01", False).pack()

    @fuzz
    @given(damaged(good))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            found = Opening.parse(data, 1, member="east", buckets=3, present_bytes=2)
            assert len(found.digests) == 3

    for_a_while(check)


def test_keys_for_masks() -> None:
    private = X25519PrivateKey.from_private_bytes(bytes(range(32)))
    own = private.public_key().public_bytes_raw()
    low_order = (bytes(32), b"\x01" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f")

    @fuzz
    @given(
        damaged(own).map(bytes.hex) | st.sampled_from(low_order).map(bytes.hex) | st.text() | st.integers() | st.none()
    )
    def check(key: Any) -> None:
        with contextlib.suppress(PeerLost):
            keys = {"west": own, "east": read_key({"mask_key": key}, "east")}
            vector = np.zeros(3, "<u4")
            Masks("west", keys, private, 0).add(vector, 1, 0)
            assert vector.any()

    for_a_while(check)


@pytest.mark.parametrize("spec", sorted({spec.partition(":")[0] for spec in SPECS}))
def test_payloads(spec: str) -> None:
    codecs = [codec_from_spec(each) for each in SPECS if each.partition(":")[0] == spec]
    shapes = st.sampled_from((Layout(((70, 60),)), Layout(((1,),)), Layout(((33,), (9, 5), (64, 64)))))

    @fuzz
    @given(st.data(), st.sampled_from(codecs), shapes)
    def check(data: st.DataObject, codec: Any, layout: Layout) -> None:
        vector = np.random.default_rng(1).standard_normal(layout.numel, dtype=np.float32)
        payload = data.draw(damaged(encoded(codec, vector, layout)))
        out = np.zeros(layout.numel, dtype=np.float32)
        with contextlib.suppress(ProtocolError), np.errstate(all="ignore"):
            assert codec.decode(memoryview(payload), layout).shape == (layout.numel,)
            codec.add(memoryview(payload), layout, np.float32(0.5), out)

    assert named(SPECS[0])
    for_a_while(check)


def test_couriers_records() -> None:
    good = doorbells.pack(doorbells.Record(doorbells.Kind.RECEIVED, 3, 1 << 20, "text"))

    @fuzz
    @given(damaged(good) | st.binary(max_size=64))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            assert doorbells.unpack(data).kind in doorbells.Kind

    for_a_while(check)


def test_greetings() -> None:
    @fuzz
    @given(damaged(pack_greeting(1 << 20, b"t" * 16)))
    def check(data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            check_greeting(data, 1 << 20, b"t" * 16)
            assert data == pack_greeting(1 << 20, b"t" * 16)

    for_a_while(check)


@pytest.fixture(scope="module")
def who(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    site = Site(tmp_path_factory.mktemp("site"))
    return {name: site.identity(name) for name in ("west", "east")}


def test_handshakes(who: dict[str, Identity]) -> None:
    """A ClientHello, damaged; and what follows it."""

    @fuzz
    @given(st.lists(edits, min_size=3, max_size=3))
    def check(changes: list[list[Edit]]) -> None:
        server = who["west"].session(server_side=True, allowed=["east"], peer="a stranger")
        client = who["east"].session(server_side=False, allowed=["west"], peer="cluster 'west'")
        with contextlib.suppress(SecurityError):
            for each in changes:
                client.handshake()
                server.feed(damage(client.take(), each))
                server.handshake()
                client.feed(server.take())

    for_a_while(check)


def test_sealed_messages(who: dict[str, Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what was sent is ever delivered, whatever happens to the messages between."""
    monkeypatch.setattr(sealed, "_LAST_WORDS_S", 0.0)
    chunks = [bytes([number]) * 60 for number in range(8)]

    @fuzz
    @given(st.integers(0, 11), edits, st.sampled_from((5, 1000)))
    def check(at: int, changes: list[Edit], renew: int) -> None:
        def attack(number: int, message: bytes) -> list[bytes]:
            return [damage(message, changes) if number == at else message]

        west, east = join(
            End(who["west"], "east", server_side=True, attack=attack, renew_records=renew),
            End(who["east"], "west", server_side=False),
        )
        todo = list(chunks)
        with contextlib.suppress(ProtocolError, SecurityError):
            for _ in range(30):
                while todo and west.send(todo[0]):
                    todo.pop(0)
                west.move()
                east.move()
        assert east.got == chunks[: len(east.got)]

    for_a_while(check)


def test_hostile_plaintext(who: dict[str, Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with a certificate says what it likes inside its session."""
    monkeypatch.setattr(sealed, "_LAST_WORDS_S", 0.0)
    good = sealed._ANSWER.pack(1, 32) + pack_greeting(1000) + sealed._LENGTH.pack(5) + b"hello" + sealed._LENGTH.pack(0)

    @fuzz
    @given(damaged(good))
    def check(plaintext: bytes) -> None:
        west, east = join(End(who["west"], "east", server_side=True), End(who["east"], "west", server_side=False))
        session = east.pump._session
        session.write = lambda data: session._tls.write(plaintext or b"\0")  # type: ignore[method-assign]
        with contextlib.suppress(ProtocolError, SecurityError):
            for _ in range(8):
                east.move()
                west.move()
        assert all(len(chunk) <= 1000 for chunk in west.got)

    for_a_while(check)


def test_certificate_requests(tmp_path: Path) -> None:
    good = pem(new_request("east", new_key()))

    @fuzz
    @given(damaged(good))
    def check(data: bytes) -> None:
        with contextlib.suppress(SecurityError):
            assert read_request(data)[0].isascii()

    for_a_while(check)


def test_signed_folders(tmp_path: Path) -> None:
    """Whatever is done to a manifest, it either means what was signed or is refused."""
    authority, key = Authority.create("a CA"), new_signing_key()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    said = sign_folder(tmp_path, key, authority.issue("alice", key.public_key()))
    manifest = tmp_path / MANIFEST
    good = manifest.read_bytes()

    @fuzz
    @given(damaged(good))
    def check(data: bytes) -> None:
        manifest.write_bytes(data)
        with contextlib.suppress(SecurityError):
            assert verify_folder(tmp_path, [authority.certificate]) == said

    for_a_while(check)


def test_what_is_damaged_is_not_always() -> None:
    """Or nothing above would ever get behind the first check."""
    good = framed(Kind.BUCKET, b"x" * 40)
    seen = set()

    @fuzz
    @given(damaged(good))
    def check(data: bytes) -> None:
        seen.add(data == good)
        seen.add(len(data) >= HEADER_BYTES)

    check()
    assert seen == {True, False}
