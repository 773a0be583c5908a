"""The door under TLS: who has no business there is refused in bounded time and memory, and counted; the run does not notice."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paddlenlp_nebula.errors import HandshakeError, NebulaError, SecurityError
from paddlenlp_nebula.link import door as door_module
from paddlenlp_nebula.link import strangers
from paddlenlp_nebula.link.door import Door, Event
from paddlenlp_nebula.link.entrance import keep_door, knock
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Frame, Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.strangers import MAX_STRANGERS, Refusals, to_make_room
from paddlenlp_nebula.security.identity import Identity
from tests.security.certificates import Site, at

from .test_door import CLUSTERS, a_knock, call, events, is_closed, message, read_message, until, where

__all__ = ["where"]  # the fixture

pytestmark = pytest.mark.timeout(60)

NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def who(site: Site) -> dict[str, Identity]:
    return {name: site.identity(name) for name in (*CLUSTERS, "mallory")}


@pytest.fixture
def log() -> list[Event]:
    return []


@pytest.fixture
def keeper(where: str, who: dict[str, Identity], log: list[Event]) -> Iterator[Door]:
    door = keep_door(where, CLUSTERS, timeout_s=5, identity=who["amber"], on_event=log.append)
    yield door
    door.close()


@pytest.fixture
def doors(keeper: Door, who: dict[str, Identity]) -> Iterator[dict[str, Door]]:
    found = {"amber": keeper}
    for name in CLUSTERS[1:]:
        found[name] = knock(keeper.where, name, CLUSTERS, timeout_s=5, identity=who[name])
    for door in found.values():
        until(lambda door=door: door.arrived() == set(CLUSTERS))
    yield found
    for door in found.values():
        door.close()


def unharmed(doors: dict[str, Door]) -> None:
    """Everybody can still talk to everybody, and nobody has heard of any trouble."""
    for sender, to in (("birch", "cedar"), ("cedar", "amber"), ("amber", "birch")):
        doors[sender].send(Kind.PORT, to, {"port": f"from {sender}"})
        (event,) = events(doors[to])
        assert (event.kind, event.cluster, event.body["port"]) == (Kind.PORT, sender, f"from {sender}")
    assert all(door.arrived() == set(CLUSTERS) for door in doors.values())


def test_everybody_meets_and_talks(doors: dict[str, Door]) -> None:
    unharmed(doors)
    doors["birch"].send(Kind.LEAVE, "cedar", {"reason": "it failed", "deliberate": False})
    assert events(doors["cedar"])[0].body["reason"] == "it failed"
    doors["cedar"].close()
    assert [(event.kind, event.cluster) for event in events(doors["amber"])] == [(Kind.GONE, "cedar")]


def test_long_messages_and_many(doors: dict[str, Door]) -> None:
    for number in range(60):
        doors["birch"].send(Kind.PORT, "cedar", {"port": str(number) + "x" * 9000})
    found: list[str] = []
    until(lambda: found.extend(event.body["port"].rstrip("x") for event in doors["cedar"].events()) or len(found) == 60)
    assert found == [str(number) for number in range(60)]


# Clusters that have no business here. Each: a sentence at both ends, and the run goes on.


def strangers_of(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Identity]]:
    other = Site(tmp_path / "other", "another CA")
    past, future = NOW - datetime.timedelta(days=20), NOW + datetime.timedelta(days=5)
    return {
        "another CA": lambda: other.identity("birch", ca=site.ca),
        "expired": lambda: at(past, lambda: site.identity("birch", file="old", days=9), monkeypatch),
        "not valid yet": lambda: at(future, lambda: site.identity("birch", file="new", days=9), monkeypatch),
        "not in the run": lambda: Identity(replace(site.credentials("mallory"), cluster="birch")),
        "not in the run, honestly": lambda: site.identity("mallory"),
        "stands in": lambda: Identity(replace(site.credentials("cedar", file="cedar2"), cluster="birch")),
    }


WORDS = {
    "another CA": (
        "refused the certificate of cluster 'birch' (unknown ca): it must be signed by a CA in the other side's tls_ca",
        "a stranger at the door must show a certificate signed by a CA in tls_ca ('test CA'), got one by another",
        "a certificate of another CA",
    ),
    "expired": (
        "refused the certificate of cluster 'birch' (certificate expired)",
        "must show a certificate that is valid today, but one in its chain has expired by this machine's clock",
        "an expired certificate",
    ),
    "not valid yet": (
        "refused the certificate of cluster 'birch'",
        "must show a certificate that is valid today, but one in its chain is not valid yet by this machine's clock",
        "a certificate that is not valid yet",
    ),
    "not in the run": (
        "refused cluster 'birch': who knocks as 'birch' must show a certificate for that cluster, got one for mallory",
        "who knocks as 'birch' must show a certificate for that cluster, got one for mallory",
        "a certificate for another name",
    ),
    "not in the run, honestly": (
        "refused cluster 'mallory': 'mallory' cannot knock: clusters are amber, birch, cedar",
        "'mallory' cannot knock: clusters are amber, birch, cedar",
        "a knock",
    ),
    "stands in": (
        "refused cluster 'birch': who knocks as 'birch' must show a certificate for that cluster, got one for cedar",
        "who knocks as 'birch' must show a certificate for that cluster, got one for cedar",
        "a certificate for another name",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_who_must_not_come_in(
    keeper: Door,
    log: list[Event],
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    who: dict[str, Identity],
) -> None:
    theirs, ours, category = WORDS[name]
    stranger = strangers_of(site, tmp_path, monkeypatch)[name]()
    start = time.monotonic()
    with pytest.raises((SecurityError, HandshakeError)) as caught:
        knock(keeper.where, stranger.cluster, CLUSTERS, timeout_s=5, identity=stranger)
    assert time.monotonic() - start < 5
    assert theirs in str(caught.value)
    (event,) = until(lambda: list(log))
    assert (event.kind, event.cluster) == (Kind.REFUSED, "")
    assert ours in event.body["reason"]
    assert keeper.refusals() == {category: 1}
    assert keeper.events() == []
    knock(keeper.where, "birch", CLUSTERS, timeout_s=5, identity=who["birch"]).close()


def test_a_door_that_is_not_the_first_clusters(where: str, who: dict[str, Identity]) -> None:
    """Whoever listens there instead, with a certificate of the same CA, is not told a word."""
    impostor = keep_door(where, CLUSTERS, timeout_s=5, identity=who["mallory"])
    with pytest.raises(
        SecurityError, match=r"cluster 'amber', at the door .*, must show a certificate for 'amber', got one for 'mal"
    ):
        knock(where, "birch", CLUSTERS, timeout_s=5, identity=who["birch"])
    assert impostor.arrived() == {"amber"}
    impostor.close()


def test_tls_on_one_side_only(where: str, who: dict[str, Identity], log: list[Event]) -> None:
    for at_door, knocking, sentence in (
        (
            who["amber"],
            None,
            "must speak TLS 1.3, got something else (wrong version number): set the same sync_security",
        ),
        (
            None,
            who["birch"],
            "must speak TLS 1.3, got something else (wrong version number): set the same sync_security",
        ),
    ):
        keeper = keep_door(where, CLUSTERS, timeout_s=5, identity=at_door, on_event=log.append)
        with pytest.raises(NebulaError) as caught:
            knock(where, "birch", CLUSTERS, timeout_s=5, identity=knocking)
        assert sentence in str(caught.value)
        assert until(lambda: log.pop() if log else None).kind is Kind.REFUSED
        keeper.close()


# Attacks on the port. Each: shown out in time, counted, and the members do not notice.


def garbage(where: str) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), os.urandom(4096), b"\x16\x03\x01\xff\xff" + os.urandom(20_000)):
        with call(where) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            assert is_closed(connection)


def a_plain_knock(where: str) -> None:
    with call(where) as connection:
        connection.sendall(a_knock())
        assert is_closed(connection)


def a_huge_length(where: str) -> None:
    with call(where) as connection:
        connection.sendall(Frame(Kind.KNOCK, 2**60).pack())
        assert is_closed(connection)


def half_open(where: str) -> None:
    with call(where) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    with call(where) as connection:
        assert is_closed(connection)


def slow_loris(where: str) -> None:
    """A ClientHello, a byte at a time, for ever."""
    with call(where) as connection, contextlib.suppress(OSError):
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400)
        for at_byte in range(len(hello)):
            connection.send(hello[at_byte : at_byte + 1])
            time.sleep(0.01)
        raise AssertionError("it was listened to for too long")


def a_thousand_connections(where: str) -> None:
    crowd = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            crowd.append(call(where))
    for connection in crowd:
        connection.close()


ATTACKS = [garbage, a_plain_knock, a_huge_length, half_open, slow_loris, a_thousand_connections]


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_on_the_port(
    doors: dict[str, Door], attack: Callable[[str], None], log: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "_STRANGER_S", 1.0)
    process = psutil.Process()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    start = time.monotonic()
    attack(doors["amber"].where)
    assert time.monotonic() - start < 20
    unharmed(doors)
    until(lambda: not any(line.cluster is None for line in doors["amber"]._board.lines))
    until(lambda: process.num_fds() <= descriptors + 3)  # a member may have been connecting when they were counted
    assert process.memory_info().rss - memory < 64 << 20
    assert sum(doors["amber"].refusals().values()) > 0
    assert 0 < len(log) < 20  # the log is not flooded


def test_a_crowd_does_not_keep_a_cluster_out(where: str, who: dict[str, Identity]) -> None:
    """While somebody opens connections as fast as it can, from the same address even."""
    keeper = keep_door(where, CLUSTERS, timeout_s=5, identity=who["amber"])
    going = True

    def crowd() -> None:
        held: list[socket.socket] = []
        while going:
            with contextlib.suppress(OSError):
                held.append(call(where))
            if len(held) > 150:
                held.pop(0).close()
            time.sleep(0.002)
        for connection in held:
            connection.close()

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        until(lambda: len(keeper._board.lines) >= MAX_STRANGERS)
        birch = knock(where, "birch", CLUSTERS, timeout_s=20, identity=who["birch"])
        assert len(keeper._board.lines) <= MAX_STRANGERS + 2
    finally:
        going = False
        thread.join()
    birch.close()
    assert keeper.refusals()["too many at once"] > 0
    keeper.close()


def test_the_crowds_own_connections_go_first() -> None:
    lines = [Line(socket.socket(), address="mallory", since=float(number)) for number in range(MAX_STRANGERS)]
    lines.insert(0, Line(socket.socket(), address="birch", since=-1.0))
    lines.insert(0, Line(socket.socket(), address="cedar", since=-2.0, cluster="cedar"))
    out = to_make_room(lines)
    assert out is lines[2]
    lines.remove(out)
    assert to_make_room(lines) is None
    for line in (*lines, out):
        line.socket.close()


def test_refusals_are_counted_and_seldom_said() -> None:
    refusals = Refusals()
    said = [number for number in range(1, 5001) if refusals.note("nonsense")]
    assert said == [1, 10, 100, 1000]
    assert refusals.counts == {"nonsense": 5000}


# On the way: somebody who can change what passes between a member and the door.


class Tamperer:
    """A TCP relay between a member and the door that changes what passes once it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            inner, _ = self._listener.accept()
            outer = call(self._where)
            outer.settimeout(None)
            self._ends = [inner, outer]
            threading.Thread(target=self._relay, args=(outer, inner, False), daemon=True).start()
            self._relay(inner, outer, True)

    def _relay(self, source: socket.socket, target: socket.socket, tampers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(self.change(data) if tampers else data)
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for end in self._ends:
            end.close()


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def replay(data: bytes) -> bytes:
    return data + data


def shorten(data: bytes) -> bytes:
    return data[:-1] + b"\x17\x03\x03\x00\x20" + bytes(32)


@pytest.mark.parametrize("change", [flip, replay, shorten])
def test_what_is_altered_on_the_way(keeper: Door, who: dict[str, Identity], change: Callable[[bytes], bytes]) -> None:
    relay = Tamperer(keeper.where)
    birch = knock(relay.where, "birch", CLUSTERS, timeout_s=5, identity=who["birch"])
    birch.send(Kind.PORT, "amber", {"port": "good"})
    assert events(keeper)[0].body["port"] == "good"
    relay.change = change
    birch.send(Kind.PORT, "amber", {"port": "evil"})
    found = [
        event for event in events(keeper) if event.kind is not Kind.PORT or event.body["port"] != "evil"
    ] or events(keeper)
    assert [(event.kind, event.cluster) for event in found] == [(Kind.GONE, "birch")]
    assert "what arrives from cluster 'birch' is not what it sent" in found[0].body["reason"]
    birch.close()
    relay.close()


# Members that misbehave: they have a certificate.


def test_a_member_that_does_not_read_what_others_send_it(
    doors: dict[str, Door], who: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not make the keeper's memory grow, and the others go on."""
    monkeypatch.setattr(door_module, "_UNREAD_BYTES", 100_000)
    doors["cedar"].close()
    assert events(doors["birch"])[0].kind is Kind.GONE
    assert events(doors["amber"])[0].kind is Kind.GONE
    connection = call(doors["amber"].where)
    line = Line(connection, "amber", who["cedar"].session(server_side=False, allowed=["amber"], peer="cluster 'amber'"))
    line.send(Kind.KNOCK, {"cluster": "cedar", "clusters": list(CLUSTERS), "protocol": PROTOCOL_VERSION})
    while next(line.messages(), None) is None:
        line.flush()
        line.fill()
    until(lambda: doors["birch"].arrived() == set(CLUSTERS))
    for _ in range(2000):  # the kernel's buffers take some megabytes
        doors["birch"].send(Kind.PORT, "cedar", {"port": "x" * 9000})
    event = until(lambda: next((e for e in doors["amber"].events() if e.kind is Kind.GONE), None))
    assert event.cluster == "cedar"
    assert "it does not read what the door sends" in event.body["reason"]
    connection.close()


def test_a_member_that_announces_2_60_bytes(keeper: Door, who: dict[str, Identity]) -> None:
    with call(keeper.where) as connection:
        line = Line(
            connection, "amber", who["birch"].session(server_side=False, allowed=["amber"], peer="cluster 'amber'")
        )
        line.send(Kind.KNOCK, {"cluster": "birch", "clusters": list(CLUSTERS), "protocol": PROTOCOL_VERSION})
        line.outgoing += Frame(Kind.PORT, 2**60).pack()
        with contextlib.suppress(EOFError):
            while True:
                line.flush()
                line.fill()
        (event,) = events(keeper)
        assert (event.kind, event.cluster) == (Kind.GONE, "birch")
        assert "announces 1152921504606846976 bytes" in event.body["reason"]


def test_messages_in_the_clear_are_not_messages(keeper: Door) -> None:
    """Nothing of a plain conversation is understood, not even in part."""
    with call(keeper.where) as connection:
        connection.sendall(a_knock() + message(Kind.LEAVE, {"to": "amber", "reason": "x"}))
        with contextlib.suppress(AssertionError, NebulaError):
            read_message(connection)
    assert keeper.arrived() == {"amber"}
