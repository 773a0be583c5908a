"""Attacks on a real link: couriers, MPI and an attacker between them, or one with a certificate that is not right.

Each is refused in bounded time, on both sides, in a sentence; nothing altered is ever delivered.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paddlenlp_nebula.errors import ChannelLost, ProtocolError
from paddlenlp_nebula.link.frames import Frame, Kind
from paddlenlp_nebula.link.stream import Stream
from paddlenlp_nebula.security.identity import Credentials
from paddlenlp_nebula.transport.courier import CourierChannel
from paddlenlp_nebula.transport.launch import courier_environment, find_mpiexec
from tests.security.certificates import Site, at

from . import contract
from .couriers import courier_below, join, pair

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).resolve().parents[2]
NOW = datetime.datetime.now(datetime.timezone.utc)
HANDSHAKE = 3  # messages of west's: its part of the handshake, and its greeting


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def good(site: Site) -> dict[str, Credentials]:
    return {name: site.credentials(name) for name in ("west", "east")}


@contextlib.contextmanager
def attacked(
    attack: str, after: int, credentials: Mapping[str, Credentials]
) -> Iterator[tuple[CourierChannel, CourierChannel]]:
    """West and east, who believe that they are joined, with the attacker between them."""
    west = CourierChannel("east", 1024, 4, credentials=credentials["west"])
    east = CourierChannel("west", 1024, 4, credentials=credentials["east"])
    attacker = subprocess.Popen(
        [*find_mpiexec(), "-n", "1", sys.executable, "-m", "tests.transport.man_in_the_middle", attack, str(after)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=courier_environment(os.environ),
        start_new_session=True,
    )
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    try:
        west.open_port()
        contract.wait_until(lambda: west.port is not None, west, east)
        assert west.port is not None
        ticket, _, port = west.port.partition(" ")
        own_port = attacker.stdout.readline().strip()
        west.accept(30)
        attacker.stdin.write(port + "\n")
        attacker.stdin.flush()
        east.connect(f"{ticket} {own_port}", 30)
        yield west, east
    finally:
        for process in [*psutil.Process(attacker.pid).children(recursive=True), psutil.Process(attacker.pid)]:
            process.kill()
        attacker.wait()
        attacker.stdin.close()
        attacker.stdout.close()
        west.close()
        east.close()


def run(*channels: CourierChannel, within_s: float = 30.0) -> dict[str, str]:
    """Drive the channels until each is lost; channel's peer -> why."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + within_s
    while len(found) < len(channels):
        assert time.monotonic() < deadline, found
        for channel in channels:
            if channel.peer not in found:
                try:
                    channel.progress()
                except ChannelLost as error:
                    found[channel.peer] = error.reason
        time.sleep(0.001)
    return found


def test_an_attacker_that_only_listens_learns_nothing_and_is_not_noticed(good: dict[str, Credentials]) -> None:
    with attacked("nothing", 0, good) as (west, east):
        contract.wait_until(lambda: west.connected and east.connected, west, east)
        for number in range(30):
            contract.send(west, b"%d" % number)
            assert contract.receive(east) == b"%d" % number
            contract.send(east, b"%d" % number)
            assert contract.receive(west) == b"%d" % number


@pytest.mark.parametrize("attack", ["flip", "truncate", "drop", "replay", "insert", "reorder"])
def test_altered_data(good: dict[str, Credentials], attack: str) -> None:
    with attacked(attack, HANDSHAKE + 10, good) as (west, east):
        contract.wait_until(lambda: west.connected and east.connected, west, east)
        got: list[bytes] = []
        sent, lost, began = 0, {}, time.monotonic()
        while len(lost) < 2 and time.monotonic() < began + 30:
            while (view := west.reserve()) is not None:
                view[:4] = sent.to_bytes(4, "big")
                west.commit(4)
                sent += 1
            for channel in (west, east):
                if channel.peer not in lost:
                    try:
                        channel.progress()
                    except ChannelLost as error:
                        lost[channel.peer] = error.reason
            while (chunk := east.peek()) is not None:
                got.append(bytes(chunk))
                east.release()
            time.sleep(0.0005)
        assert "what arrives from cluster 'west' is not what it sent" in lost["west"]
        # West hears it from east's alert, or sees east's courier end.
        assert (
            "what arrives at cluster 'east' is not what this cluster sent" in lost["east"] or "courier" in lost["east"]
        )
        assert got == [number.to_bytes(4, "big") for number in range(len(got))]
        assert 5 < len(got) < 20


def test_an_attack_on_the_handshake(good: dict[str, Credentials]) -> None:
    with attacked("flip", 0, good) as (west, east):
        lost = run(west, east)
        assert not west.connected
        assert not east.connected
        assert any(
            "cluster 'west'" in reason and ("TLS 1.3" in reason or "not what it sent" in reason)
            for reason in lost.values()
        )


# Couriers whose certificates are not right.


def strangers(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Credentials, str, str]]:
    """What east has, and what west and east say."""
    other = Site(tmp_path / "other", "another CA")
    past = NOW - datetime.timedelta(days=20)
    mallory = replace(site.credentials("mallory"), cluster="east")
    return {
        "another CA": (
            other.credentials("east", ca=site.ca),
            "cluster 'east' must show a certificate signed by a CA in tls_ca ('test CA'), got one by another",
            "cluster 'west' refused the certificate of cluster 'east' (unknown ca)",
        ),
        "expired": (
            at(past, lambda: site.credentials("east", file="expired", days=9), monkeypatch),
            "cluster 'east' must show a certificate that is valid today, but one in its chain has expired",
            "cluster 'west' refused the certificate of cluster 'east' (certificate expired)",
        ),
        "another name": (
            mallory,
            "cluster 'east' must show a certificate for 'east', got one for 'mallory' (issued by 'test CA', valid from",
            "the other side refused: cluster 'east' must show a certificate for 'east', got one for 'mallory'",
        ),
    }


@pytest.mark.parametrize("name", ["another CA", "expired", "another name"])
def test_a_courier_whose_certificate_is_not_right(
    site: Site, good: dict[str, Credentials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    theirs, west_says, east_says = strangers(site, tmp_path, monkeypatch)[name]
    west = CourierChannel("east", 1024, 4, credentials=good["west"])
    east = CourierChannel("west", 1024, 4, credentials=theirs)
    try:
        with pytest.raises(ChannelLost):
            join(west, east)
        lost = run(west, east)
        assert west_says in lost["east"]
        assert east_says in lost["west"]
        assert not west.connected
    finally:
        west.close()
        east.close()


def test_key_files_that_are_not_in_order(site: Site, good: dict[str, Credentials]) -> None:
    """As when somebody changes a mode while the run goes on: the new courier says what is wrong."""
    files = site.credentials("north")
    Path(files.key).chmod(0o640)
    channel = CourierChannel("east", 1024, 4, credentials=files)
    try:
        assert "tls_key must be for its owner alone (mode 0600)" in run(channel)["east"]
    finally:
        channel.close()


def test_neither_key_nor_passphrase_is_where_others_can_see_it(good: dict[str, Credentials]) -> None:
    secret = {name: replace(files, passphrase="open sesame") for name, files in good.items()}
    with pair(credentials=secret) as (west, _):
        courier = courier_below(west)
        seen = " ".join(courier.cmdline()) + str(courier.environ())
        assert "sesame" not in seen
        assert good["west"].key not in seen


# A member that breaks the rules: it has a certificate and is in the run.


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, (64 << 20) + 1])
def test_a_member_that_announces_a_huge_length(good: dict[str, Credentials], length: int) -> None:
    with pair(credentials=good) as (west, east):
        contract.send(east, Frame(Kind.BUCKET, length).pack())
        stream = Stream(west)
        before = psutil.Process().memory_info().rss
        contract.wait_until(lambda: west.peek() is not None, west, east)
        with pytest.raises(
            ProtocolError, match=f"a BUCKET frame from cluster 'east' announces {length} bytes, the limit is"
        ):
            stream.pump()
        assert psutil.Process().memory_info().rss - before < 16 << 20


# MPI's own port, which anybody who can reach it can talk to.


def addresses(channel: CourierChannel) -> list[tuple[str, int]]:
    """Where a courier listens."""
    found = courier_below(channel).net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def trouble(channel: CourierChannel, connections: int = 1) -> list[socket.socket]:
    """Garbage and silence at all of MPI's ports."""
    held = []
    for address in addresses(channel):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4000), b"\0" * 100_000):
            for _ in range(connections):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(address, timeout=5))
                    held[-1].sendall(data)
    return held


def test_garbage_at_a_joined_couriers_port(good: dict[str, Credentials]) -> None:
    with pair(credentials=good) as (west, east):
        assert addresses(west)
        held = trouble(west, 20)
        for number in range(200):
            contract.send(east, b"%d" % number)
            assert contract.receive(west) == b"%d" % number
        for connection in held:
            connection.close()


def test_garbage_at_a_couriers_port_before_its_peer_comes(good: dict[str, Credentials]) -> None:
    west = CourierChannel("east", 1024, 4, credentials=good["west"])
    east = CourierChannel("west", 1024, 4, credentials=good["east"])
    held: list[socket.socket] = []
    try:
        west.open_port()
        contract.wait_until(lambda: west.port is not None, west, east)
        held = trouble(west, 5)
        assert west.port is not None
        west.accept(20)
        time.sleep(0.3)
        held += trouble(west, 5)
        east.connect(west.port, 20)
        contract.wait_until(lambda: west.connected and east.connected, west, east)
        contract.send(east, b"all the same")
        assert contract.receive(west) == b"all the same"
    finally:
        for connection in held:
            connection.close()
        west.close()
        east.close()
