"""The sealed pump over a wire in memory: what it carries, and what an attacker on the wire achieves."""

from __future__ import annotations

import random
import re
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.errors import NebulaError, ProtocolError, SecurityError
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.transport import sealed
from tests.security.certificates import Site

from .sealing import Attack, End, join, rounds, run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def who(site: Site) -> dict[str, Identity]:
    return {name: site.identity(name) for name in ("west", "east", "mallory")}


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last words of a side that fails are for one that listens; here both are in one thread."""
    monkeypatch.setattr(sealed, "_LAST_WORDS_S", 0.0)


def ends(who: dict[str, Identity], **more: object) -> tuple[End, End]:
    """West and east; arguments are for both, or ``west_...`` and ``east_...`` for one."""
    own = {
        side: {key.removeprefix(f"{side}_"): value for key, value in more.items() if key.startswith(f"{side}_")}
        for side in ("west", "east")
    }
    both = {key: value for key, value in more.items() if not key.startswith(("west_", "east_"))}
    return join(
        End(who["west"], "east", server_side=True, **both, **own["west"]),
        End(who["east"], "west", server_side=False, **both, **own["east"]),
    )


def exchange(west: End, east: End, there: list[bytes], back: list[bytes], most: int = 2000) -> None:
    """Carry chunks both ways and compare them."""
    todo = {west: list(there), east: list(back)}
    before = {west: len(west.got), east: len(east.got)}
    for _ in rounds(west, east, most=most):
        for end, chunks in todo.items():
            while chunks and end.send(chunks[0]):
                chunks.pop(0)
        if len(west.got) - before[west] == len(back) and len(east.got) - before[east] == len(there):
            break
    assert west.got[before[west] :] == back
    assert east.got[before[east] :] == there


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 1000), max_size=20),
    st.lists(st.integers(1, 1000), max_size=20),
    st.integers(1, 4),
    st.sampled_from([3, 7, 1 << 22]),
)
def test_chunks_come_whole_and_in_order(
    who: dict[str, Identity], there: list[int], back: list[int], chunks: int, renew: int
) -> None:
    """Whatever their sizes, and however often sessions are renewed in between."""
    west, east = ends(who, chunks=chunks, renew_records=renew)
    rng = random.Random(0)
    exchange(west, east, [rng.randbytes(n) for n in there], [rng.randbytes(n) for n in back])
    if renew == 3 and len(there) + len(back) > 10:
        assert west.pump.sessions > 2


def test_large_chunks_are_cut_into_pieces(who: dict[str, Identity]) -> None:
    west, east = ends(who, chunk_bytes=1 << 20, chunks=2)
    rng = random.Random(1)
    chunks = [rng.randbytes(n) for n in (1 << 20, 1, (1 << 18) + 1, 1 << 18, 1 << 20, 1 << 19)]
    exchange(west, east, chunks, chunks)
    paid = sum(map(len, chunks))
    assert west.wire.crossed < 1.01 * paid
    run(west, east, most=10)
    assert all(end.pump.sending == 0 for end in (west, east))


def test_nothing_readable_crosses_the_wire(who: dict[str, Identity]) -> None:
    seen: list[bytes] = []

    def eavesdrop(number: int, message: bytes) -> list[bytes]:
        seen.append(message)
        return [message]

    west, east = ends(who, attack=eavesdrop)
    exchange(west, east, [b"a secret word " * 50], [b"another one " * 50])
    everything = b"".join(seen)
    for word in (b"a secret word", b"another one", b"west", b"east", b"test CA"):  # certificates travel sealed, too
        assert word not in everything


def test_who_does_not_read_stops_who_sends(who: dict[str, Identity]) -> None:
    chunks = 4
    west, east = ends(who, chunks=chunks)
    exchange(west, east, [b"ready"], [b"ready"])
    east.reads = False
    sent = 0
    for _ in rounds(west, east, most=100):
        while west.send(b"x" * 1000):
            sent += 1
    assert sent <= 3 * chunks
    assert len(east.got) == 1 + chunks
    east.reads = True
    run(west, east, most=100)
    assert east.got[1:] == [b"x" * 1000] * sent
    assert west.pump.sending == 0


def test_a_session_is_renewed_by_its_age(who: dict[str, Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sealed.time, "monotonic", lambda: now)
    west, east = ends(who, renew_s=60.0)
    exchange(west, east, [b"one"], [b"two"])
    now = 59.0
    exchange(west, east, [b"three"], [])
    assert (west.pump.sessions, east.pump.sessions) == (1, 1)
    now = 61.0
    exchange(west, east, [b"four"] * 9, [b"five"] * 9)
    assert (west.pump.sessions, east.pump.sessions) == (2, 2)


def test_a_new_certificate_is_taken_at_the_next_session(site: Site, tmp_path: Path) -> None:
    site = Site(tmp_path)
    notes: list[str] = []
    who = {name: site.identity(name, notes.append) for name in ("west", "east")}
    west, east = ends(who, renew_records=20)
    exchange(west, east, [b"one"], [b"two"])
    site.credentials("east", days=3)
    exchange(west, east, [b"x"] * 30, [b"y"] * 30)
    assert west.pump.sessions > 1
    (sentence,) = set(west.notes)
    assert "the certificate of cluster 'east' expires in 3.0 days" in sentence
    # Files that do not load change nothing: the old certificate is used on.
    Path(who["east"].credentials.cert).write_text("not a certificate")
    before = west.pump.sessions
    exchange(west, east, [b"x"] * 30, [b"y"] * 30)
    assert west.pump.sessions > before
    assert "the changed TLS files of cluster 'east' were not taken" in notes[0]


# Attacks on the wire. West and east talk; the attacker sees every message of one of them, sealed, and passes on others.

WARM_UP = 6  # messages of the handshake and the greeting, at most


def flip(number: int, message: bytes) -> list[bytes]:
    if number < WARM_UP:
        return [message]
    damaged = bytearray(message)
    damaged[len(message) // 2] ^= 1
    return [bytes(damaged)]


def truncate(number: int, message: bytes) -> list[bytes]:
    return [message] if number < WARM_UP else [message[:-1]]


def drop(number: int, message: bytes) -> list[bytes]:
    return [] if number == WARM_UP else [message]


def replay(number: int, message: bytes) -> list[bytes]:
    return [message] if number < WARM_UP else [message, message]


def insert(number: int, message: bytes) -> list[bytes]:
    return [message] if number < WARM_UP else [b"\x17\x03\x03\x00\x20" + bytes(32), message]


def reorder() -> Attack:
    kept: list[bytes] = []

    def attack(number: int, message: bytes) -> list[bytes]:
        if number == WARM_UP:
            kept.append(message)
            return []
        return [message, kept.pop()] if kept else [message]

    return attack


ATTACKS = {"flip": flip, "truncate": truncate, "drop": drop, "replay": replay, "insert": insert, "reorder": reorder()}


@pytest.mark.parametrize("name", ATTACKS)
def test_altered_data_is_noticed_and_nothing_of_it_is_believed(who: dict[str, Identity], name: str) -> None:
    west, east = ends(who, west_attack=ATTACKS[name])
    chunks = [bytes([number]) * 100 for number in range(60)]
    todo = list(chunks)

    def send_all() -> None:
        for _ in rounds(west, east):
            while todo and west.send(todo[0]):
                todo.pop(0)

    with pytest.raises(SecurityError, match="from cluster 'west' is not what it sent") as caught:
        send_all()
    assert caught.value.category == "altered data"
    assert east.got == chunks[: len(east.got)]
    assert len(east.got) < 60
    with pytest.raises(SecurityError, match="what arrives at cluster 'east' is not what this cluster sent"):
        run(west)  # OpenSSL's alert tells the sender


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 12), st.integers(0, 10_000), st.integers(0, 7))
def test_any_flipped_bit_at_any_time(who: dict[str, Identity], message: int, at: int, bit: int) -> None:
    def attack(number: int, data: bytes) -> list[bytes]:
        if number != message:
            return [data]
        damaged = bytearray(data)
        damaged[at % len(data)] ^= 1 << bit
        return [bytes(damaged)]

    west, east = ends(who, west_attack=attack)
    todo = [bytes([number]) * 100 for number in range(20)]
    with suppress(NebulaError):
        for _ in rounds(west, east, most=60):
            while todo and west.send(todo[0]):
                todo.pop(0)
    assert east.got == [bytes([number]) * 100 for number in range(len(east.got))]
    if WARM_UP <= message < west.wire._number:
        assert len(east.got) < 20
    # Of the first message, a version number that TLS 1.3 ignores may be changed, without any effect.


def test_messages_may_be_cut_and_joined(who: dict[str, Identity]) -> None:
    """Their boundaries mean nothing."""
    west, east = ends(who, west_attack=lambda number, message: [message[:7], message[7:30], message[30:]])
    exchange(west, east, [b"one" * 100, b"two", b"three" * 30], [b"x"])


@given(st.binary(min_size=1, max_size=3000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_instead_of_a_handshake(who: dict[str, Identity], data: bytes) -> None:
    west, east = ends(who, east_attack=lambda number, message: [data])
    with suppress(NebulaError):
        run(west, east, most=20)
    assert not west.pump.ready
    assert not west.got


# Who may be at the other end


def refusals(west: End, east: End) -> dict[str, NebulaError]:
    """What each side says."""
    found: dict[str, NebulaError] = {}
    for _ in range(30):
        for name, end in (("west", west), ("east", east)):
            if name not in found:
                try:
                    end.move()
                except NebulaError as error:
                    found[name] = error
    assert not west.pump.ready or not east.pump.ready
    assert not west.got
    assert not east.got
    return found


def test_another_cas_certificate_is_refused_and_both_say_so(
    who: dict[str, Identity], site: Site, tmp_path: Path
) -> None:
    other = Site(tmp_path, "another CA")
    found = refusals(*ends({"west": who["west"], "east": other.identity("east", ca=site.ca)}))
    assert "cluster 'east' must show a certificate signed by a CA in tls_ca ('test CA')" in str(found["west"])
    assert "cluster 'west' refused the certificate of cluster 'east' (unknown ca)" in str(found["east"])


@pytest.mark.parametrize("role", ["west", "east"])
def test_the_right_certificate_under_a_wrong_name(who: dict[str, Identity], role: str) -> None:
    """A cluster of the same CA that is not in this run, or stands in for another, in either role of TLS."""
    other = "east" if role == "west" else "west"
    found = refusals(*ends({**who, role: who["mallory"]}))
    reason = (
        f"cluster {role!r} must show a certificate for {role!r}, got one for 'mallory' (issued by 'test CA', valid from"
    )
    assert reason in str(found[other])
    assert f"the other side refused: {reason}" in str(found[role])


def test_who_has_another_ticket_is_of_another_run(who: dict[str, Identity]) -> None:
    found = refusals(*ends(who, west_ticket=b"a" * 16, east_ticket=b"b" * 16))
    for error in found.values():
        assert "not the courier that the door announced, but one of another run" in str(error)
    assert len(found) == 2


# A member that breaks the rules: it has a certificate, and the run's secrets.


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (sealed._ANSWER.pack(1, 2**32 - 1), "must be at most 1024 bytes, got 4294967295 of kind 1"),
        (sealed._ANSWER.pack(1, 0), "must be at most 1024 bytes, got 0"),
        (sealed._ANSWER.pack(9, 5), "got 5 of kind 9"),
        (sealed._ANSWER.pack(1, 32) + b"x" * 32, "speaks another version"),
        (sealed._ANSWER.pack(1, 5) + b"x" * 5, "speaks another version"),
        (sealed._ANSWER.pack(2, 5) + b"\xffno\xff!", "the other side refused"),
    ],
)
def test_hostile_answers(who: dict[str, Identity], answer: bytes, sentence: str) -> None:
    west, east = ends(who)
    session = east.pump._session
    session.write = lambda data: session._tls.write(answer)  # type: ignore[method-assign]  # in place of its welcome
    with pytest.raises(NebulaError, match=re.escape(sentence)):
        run(west, east, most=30)
    assert not west.pump.ready


@pytest.mark.parametrize("length", [1001, 1 << 20, 2**32 - 1])
def test_a_hostile_length_costs_nothing(who: dict[str, Identity], length: int) -> None:
    west, east = ends(who)
    exchange(west, east, [b"one"], [b"two"])
    tracemalloc.start()
    east.pump._session.write(sealed._LENGTH.pack(length) + b"x" * 100)
    east.pump._post()
    with pytest.raises(ProtocolError, match=f"must have at most 1000 bytes, got {length}"):
        run(west, east, most=20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_nothing_may_follow_the_end_of_a_session(who: dict[str, Identity]) -> None:
    west, east = ends(who)
    exchange(west, east, [b"one"], [b"two"])
    east.pump._session.write(sealed._LENGTH.pack(0))
    east.pump._session.write(sealed._LENGTH.pack(3) + b"abc")
    east.pump._post()
    with pytest.raises(ProtocolError, match="nothing may follow the end of a TLS session"):
        run(west, east, most=20)


# The wire's end


def test_what_had_arrived_comes_before_the_wires_end(who: dict[str, Identity]) -> None:
    class Gone(Exception):
        pass

    west, east = ends(who)
    exchange(west, east, [b"one"], [b"two"])
    east.reads = False
    for number in range(8):
        run(west, east, most=3)
        west.send(bytes([number]))
    run(west, most=3)
    east.wire.closed = Gone()
    run(east, most=5)
    assert len(east.got) == 5
    east.reads = True
    with pytest.raises(Gone):
        run(east, most=50)
    assert east.got[1:] == [bytes([number]) for number in range(8)]
