"""Opening a link: the door and the couriers together, with couriers that are threads of this process."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import psutil
import pytest

from paddlenlp_nebula.errors import ChannelLost, HandshakeError, NebulaError, PeerLost
from paddlenlp_nebula.link import departures, entrance
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.rendezvous import open_link
from paddlenlp_nebula.security.identity import Credentials
from paddlenlp_nebula.transport import courier
from paddlenlp_nebula.transport.loopback import LoopbackChannel, loopback_pair

from .clusters import NAMES, at_once

pytestmark = pytest.mark.timeout(30)


class Courier:
    """What rendezvous sees of a courier; two of them meet by port without any MPI."""

    exchange: ClassVar[dict[str, LoopbackChannel]] = {}
    numbers = itertools.count()
    broken: ClassVar[set[str]] = set()
    open: ClassVar[set[Courier]] = set()

    def __init__(self, peer: str, *, credentials: Credentials | None = None) -> None:
        self.peer = peer
        self.port: str | None = None
        self.connected = False
        self.channel: LoopbackChannel | None = None
        self._asked = False
        self._far: LoopbackChannel | None = None
        self._bell = os.eventfd(0)
        Courier.open.add(self)

    def open_port(self) -> None:
        self._asked = True

    def accept(self, timeout_s: float) -> None:
        assert self.port is not None
        self.channel, self._far = loopback_pair("accepting", self.peer)
        self.channel.peer = self.peer
        if self.peer not in self.broken:
            Courier.exchange[self.port] = self._far

    def connect(self, port: str, timeout_s: float) -> None:
        self.port = port

    def progress(self) -> None:
        if self._asked and self.port is None:
            self.port = f"port-{next(Courier.numbers)}"
        if self.channel is not None and self.port not in Courier.exchange and self.peer not in self.broken:
            self.connected = True
        elif self.channel is None and self.port in Courier.exchange and not self._asked:
            self.channel = Courier.exchange.pop(str(self.port))
            self.channel.peer = self.peer
            self.connected = True
        if self.connected:
            assert self.channel is not None
            self.channel.progress()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def fileno(self) -> int | None:
        return self.channel.fileno() if self.connected and self.channel is not None else self._bell

    def close(self) -> None:
        if self in Courier.open:
            Courier.open.remove(self)
            os.close(self._bell)
            if self.channel is not None:
                self.channel.close()
            if self._far is not None and Courier.exchange.pop(str(self.port), None) is not None:
                self._far.close()  # nobody has come for it: with the one that accepts the port is gone


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(courier, "CourierChannel", Courier)
    monkeypatch.setattr(Courier, "broken", set())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def opened(cluster: str, clusters: Sequence[str], where: str, timeout_s: float = 20.0, **more: Any) -> Link:
    return open_link(cluster, clusters, where, timeout_s=timeout_s, **more)


def all_open(where: str, clusters: Sequence[str], timeout_s: float = 20.0, delay_s: float = 0.0) -> dict[str, Any]:
    """Every cluster opens its link, the later ones a little later."""

    def one(name: str) -> Link:
        time.sleep(delay_s * clusters.index(name))
        return opened(name, clusters, where, timeout_s)

    return at_once({name: lambda name=name: one(name) for name in clusters})


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_all_meet_and_can_speak(where: str, members: int, delay_s: float) -> None:
    clusters = NAMES[:members]
    links = all_open(where, clusters, delay_s=delay_s)
    notes = at_once(
        {name: lambda link=link: all_gather_notes(link, {"i": link.cluster}) for name, link in links.items()}
    )
    assert all(list(found) == list(clusters) for found in notes.values()), notes
    at_once({name: lambda link=link: link.leave("done", deliberate=True) for name, link in links.items()})
    assert not Courier.open


def test_alone_needs_nobody() -> None:
    link = opened("amber", ["amber"], "nowhere:1")
    assert link.members == ("amber",)
    link.leave("done", deliberate=True)


def test_loopback_needs_no_door() -> None:
    links = all_open("loopback", NAMES[:3])
    assert {link.peers for link in links.values()} == {("birch", "cedar"), ("amber", "cedar"), ("amber", "birch")}
    for link in links.values():
        link.close()


def test_who_never_came_is_named_with_the_place(where: str) -> None:
    ticks: list[float] = []
    start = time.monotonic()
    outcomes = at_once(
        {
            "amber": lambda: opened("amber", NAMES[:3], where, 2.0, on_wait=lambda: ticks.append(time.monotonic())),
            "birch": lambda: opened("birch", NAMES[:3], where),
        }
    )
    assert 2.0 <= time.monotonic() - start < 15
    assert str(outcomes["amber"]) == (
        f"cluster 'amber' waited 2 s (sync_timeout_s) at the door '{where}' for 'cedar', which never knocked: is it "
        "started, with the same rendezvous, and is the port open in this site's firewall?"
    )
    assert isinstance(outcomes["birch"], PeerLost)
    assert "while the clusters were meeting: NebulaError: cluster 'amber' waited" in str(outcomes["birch"])
    assert len(ticks) >= 3
    assert not Courier.open


def test_the_first_cluster_is_missing(where: str) -> None:
    with pytest.raises(NebulaError, match=f"looked for cluster 'amber' at rendezvous='{where}' for 0.4 s"):
        opened("birch", NAMES[:2], where, 0.4)


def test_the_door_opens_but_mpi_does_not(where: str) -> None:
    Courier.broken.add("birch")
    outcomes = all_open(where, NAMES[:2], timeout_s=3.0)
    for name in NAMES[:2]:  # whoever loses patience first tells the other
        assert isinstance(outcomes[name], NebulaError)
        assert "at the door" in str(outcomes[name])
        assert "MPI uses TCP ports of its own, are they open in both firewalls?" in str(outcomes[name])
    assert not Courier.open


@pytest.mark.parametrize("victim", NAMES[:3])
def test_one_fails_while_meeting(where: str, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met = threading.Event()

    def fail() -> None:
        if threading.current_thread().name == victim and met.is_set():
            raise ChannelLost("delta", "its courier ended with 139")

    def one(name: str) -> Link:
        if name != "delta":  # which never comes
            return opened(name, NAMES, where, on_wait=fail)
        while len(Courier.open) < 9:  # three for each of those who have come
            time.sleep(0.01)
        met.set()
        raise AssertionError

    start = time.monotonic()
    outcomes = at_once({name: lambda name=name: one(name) for name in NAMES})
    assert time.monotonic() - start < 10
    for name in set(NAMES[:3]) - {victim}:
        assert isinstance(outcomes[name], PeerLost)
    told = outcomes["birch" if victim == "amber" else "amber"]
    assert "while the clusters were meeting: ChannelLost: the channel to cluster 'delta' is lost" in str(told)
    assert not Courier.open


def test_clusters_that_do_not_fit_together_fail_on_both_sides(where: str) -> None:
    start = time.monotonic()
    outcomes = at_once(
        {
            "amber": lambda: opened("amber", ["amber", "birch"], where),
            "birch": lambda: opened("birch", ["amber", "birch", "cedar"], where),
        }
    )
    assert time.monotonic() - start < 10
    for outcome in outcomes.values():
        assert isinstance(outcome, HandshakeError)
        assert "has clusters=['amber', 'birch'] but cluster 'birch' has" in str(outcome)


def test_releases_that_do_not_fit_together_fail_on_both_sides(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "PROTOCOL_VERSION", 0)
    outcomes = all_open(where, NAMES[:2])
    for outcome in outcomes.values():
        assert isinstance(outcome, HandshakeError)
        assert "'amber' speaks protocol version 1 but cluster 'birch' 0: install the same release" in str(outcome)


def test_a_run_that_has_begun_is_closed(where: str) -> None:
    links = all_open(where, NAMES[:2])
    with pytest.raises(HandshakeError, match="is already in the run"):
        opened("birch", NAMES[:2], where)
    links["birch"].close()
    deadline = time.monotonic() + 20
    while "birch" not in links["amber"].departures() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(HandshakeError, match="has already started without it"):
        opened("birch", NAMES[:2], where)
    links["amber"].close()


def dies(link: Link) -> None:
    assert link._door is not None
    link._door.close()


def fails(link: Link) -> None:
    link.leave("it failed", deliberate=False, linger_s=0.1)


@pytest.mark.parametrize(("end", "reason"), [(dies, "without a goodbye"), (fails, "it failed")])
@pytest.mark.parametrize("victim", NAMES[:3])
def test_the_door_tells_who_waits_at_once(where: str, victim: str, end: Callable[[Link], None], reason: str) -> None:
    links = all_open(where, NAMES[:3])

    def one(link: Link) -> str:
        if link.cluster == victim:
            time.sleep(0.3)
            end(link)
            return ""
        with pytest.raises(PeerLost) as lost:
            all_gather_notes(link, {})
        assert lost.value.peer == victim
        return lost.value.reason

    start = time.monotonic()
    outcomes = at_once({name: lambda link=link: one(link) for name, link in links.items()})
    assert time.monotonic() - start < 10
    for name, outcome in outcomes.items():
        assert isinstance(outcome, str)
        assert name == victim or reason in outcome
    for link in links.values():
        link.close()


def test_what_is_in_flight_is_read_although_the_door_was_faster(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "_LAST_WORDS_S", 10.0)
    links = all_open(where, NAMES[:2])

    def amber() -> dict[str, Any]:
        return all_gather_notes(links["amber"], {})

    def birch() -> None:
        assert links["birch"]._door is not None
        links["birch"]._door.send(Kind.LEAVE, "amber", {"reason": "it failed"})
        time.sleep(0.2)
        all_gather_notes(links["birch"], {"last": "words"})

    assert at_once({"amber": amber, "birch": birch})["amber"]["birch"] == {"last": "words"}
    for link in links.values():
        link.close()


def test_nothing_is_left_open(where: str) -> None:
    def life() -> None:
        links = all_open(where, NAMES[:3])
        at_once({name: lambda link=link: link.leave("done", deliberate=True) for name, link in links.items()})

    life()
    before = (psutil.Process().num_fds(), threading.active_count())
    for _ in range(3):
        life()
    assert (psutil.Process().num_fds(), threading.active_count()) == before
