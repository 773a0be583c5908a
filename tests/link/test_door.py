"""The door: who is let in, who is told what, and that nobody outside can do any harm."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from paddlenlp_nebula.errors import HandshakeError, NebulaError, ProtocolError
from paddlenlp_nebula.link import strangers
from paddlenlp_nebula.link.deadlines import Reminder
from paddlenlp_nebula.link.door import Door, Event
from paddlenlp_nebula.link.entrance import Knocker, keep_door, knock
from paddlenlp_nebula.link.frames import HEADER_BYTES, PROTOCOL_VERSION, Frame, Kind, checksum
from paddlenlp_nebula.link.line import LIMIT_BYTES, Line
from paddlenlp_nebula.link.strangers import MAX_STRANGERS

from .clusters import at_once

CLUSTERS = ("amber", "birch", "cedar")

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def where() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def keeper(where: str) -> Iterator[Door]:
    door = keep_door(where, CLUSTERS, timeout_s=5)
    yield door
    door.close()


@pytest.fixture
def doors(keeper: Door) -> Iterator[dict[str, Door]]:
    """All three clusters, each having heard of the others."""
    found = {"amber": keeper}
    for name in CLUSTERS[1:]:
        found[name] = knock(keeper.where, name, CLUSTERS, timeout_s=5)
    for door in found.values():
        until(lambda door=door: door.arrived() == set(CLUSTERS))
    yield found
    for door in found.values():
        door.close()


def until(true: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait for something to become true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return value


def events(door: Door) -> list[Event]:
    """The next events, waited for."""
    found: list[Event] = []
    until(lambda: found.extend(door.events()) or found)
    return found


def call(where: str) -> socket.socket:
    host, port = where.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def message(kind: Kind, body: Any, **fields: int) -> bytes:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Frame(kind, len(payload), checksum=checksum(payload), **fields).pack() + payload


def a_knock(cluster: Any = "birch", clusters: Any = CLUSTERS, protocol: Any = PROTOCOL_VERSION) -> bytes:
    return message(Kind.KNOCK, {"cluster": cluster, "clusters": clusters, "protocol": protocol})


def read_message(connection: socket.socket) -> tuple[Kind, dict[str, Any]]:
    data = b""
    while len(data) < HEADER_BYTES or len(data) < HEADER_BYTES + Frame.parse(data, sender="the door").length:
        received = connection.recv(4096)
        assert received, "closed"
        data += received
    return Frame.parse(data, sender="the door").kind, json.loads(data[HEADER_BYTES:])


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, waiting as long as the socket's timeout."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


# Letting in


def test_everybody_knows_who_has_arrived(doors: dict[str, Door]) -> None:
    for name, door in doors.items():
        assert door.cluster == name
        assert door.arrived() == set(CLUSTERS)
        assert door.events() == []


def test_knocking_begins_before_the_door_opens(where: str) -> None:
    waits: list[None] = []
    knocker = functools.partial(knock, where, "birch", CLUSTERS, timeout_s=5, while_waiting=lambda: waits.append(None))

    def keep() -> Door:
        until(lambda: len(waits) > 1)
        return keep_door(where, CLUSTERS, timeout_s=5)

    doors = at_once({"birch": knocker, "amber": keep})
    assert doors["birch"].arrived() == {"amber", "birch"}
    for door in doors.values():
        door.close()


def test_a_door_that_never_opens_is_named(where: str) -> None:
    start = time.monotonic()
    with pytest.raises(NebulaError) as missing:
        knock(where, "birch", CLUSTERS, timeout_s=0.5)
    assert 0.4 < time.monotonic() - start < 10
    assert f"'birch' looked for cluster 'amber' at rendezvous='{where}' for 0.5 s" in str(missing.value)


def test_a_port_that_is_taken(where: str, keeper: Door) -> None:
    with pytest.raises(
        NebulaError, match=r"cannot listen there .*: is 'amber' started already\? Else choose a free port"
    ):
        keep_door(where, CLUSTERS, timeout_s=5)


def test_a_name_that_is_not_this_machines_means_all_addresses(where: str) -> None:
    port = where.split(":")[1]
    keeper = keep_door(f"no-such-host.invalid:{port}", CLUSTERS, timeout_s=5)
    birch = knock(where, "birch", CLUSTERS, timeout_s=5)
    birch.close()
    keeper.close()


@pytest.mark.parametrize(("host", "knocked"), [("::1", "[::1]"), ("[::1]", "::1"), ("localhost", "localhost")])
def test_other_ways_to_write_this_machine(where: str, host: str, knocked: str) -> None:
    port = where.split(":")[1]
    keeper = keep_door(f"{host}:{port}", CLUSTERS, timeout_s=5)
    knock(f"{knocked}:{port}", "birch", CLUSTERS, timeout_s=5).close()
    keeper.close()


def test_a_name_that_hides_this_machine_means_all_addresses(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts gives the machine's own name the address 127.0.1.1."""
    resolve = socket.getaddrinfo

    def as_on_debian(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.1.1" if host == "amber.example.org" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", as_on_debian)
    port = where.split(":")[1]
    keeper = keep_door(f"amber.example.org:{port}", CLUSTERS, timeout_s=5)
    knock(f"127.0.0.1:{port}", "birch", CLUSTERS, timeout_s=5).close()
    keeper.close()


def test_who_looks_for_the_door_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("paddlenlp_nebula.link.entrance.Reminder", functools.partial(Reminder, every_s=1.2))
    with pytest.raises(NebulaError, match="did not find it"):
        knock(where, "birch", CLUSTERS, timeout_s=1, say=said.append)
    assert len(said) == 1
    assert re.fullmatch(f"still looking for cluster 'amber' at {where} .*refused.*, [01] s more", said[0])


def test_something_else_answers(where: str) -> None:
    host, port = where.split(":")
    with socket.create_server((host, int(port))) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nServer: an example\r\n\r\n")

        outcomes = at_once({"server": serve, "birch": lambda: knock(where, "birch", CLUSTERS, timeout_s=3)})
    assert isinstance(outcomes["birch"], ProtocolError)
    assert "is something else using this address?" in str(outcomes["birch"])


REFUSALS = [
    (a_knock(protocol=99), "speaks protocol version 1 but cluster 'birch' 99: install the same release", True),
    (a_knock(protocol=None), "speaks protocol version 1 but cluster 'birch' None", True),
    (a_knock(clusters=["amber", "birch"]), "but cluster 'birch' has clusters=['amber', 'birch']", True),
    (a_knock(clusters="x" * 9000), "but cluster 'birch' has clusters='xxx", True),
    (a_knock(cluster="x", clusters=["amber", "x"]), "but cluster 'x' has clusters=['amber', 'x']", False),
    (a_knock(cluster="mallory"), "'mallory' cannot knock: clusters are amber, birch, cedar", False),
    (a_knock(cluster="amber"), "'amber' cannot knock", False),
    (a_knock(cluster=["birch"]), "['birch'] cannot knock", False),
    (a_knock(cluster={"a": 1}), "{'a': 1} cannot knock", False),
    (message(Kind.KNOCK, {}), "speaks protocol version 1 but cluster None None", False),
]


@pytest.mark.parametrize(("knocked", "reason", "concerns_us"), REFUSALS)
def test_refusals_say_why_to_both(keeper: Door, knocked: bytes, reason: str, concerns_us: bool) -> None:
    with call(keeper.where) as connection:
        connection.sendall(knocked)
        kind, body = read_message(connection)
        assert kind is Kind.REFUSED
        assert reason in body["reason"]
        assert is_closed(connection)
    found = keeper.events()
    assert [(event.kind, event.cluster) for event in found] == [(Kind.REFUSED, "birch")] * concerns_us
    assert all(reason in event.body["reason"] for event in found)
    assert keeper.arrived() == {"amber"}


def test_the_same_name_twice(doors: dict[str, Door], keeper: Door) -> None:
    with pytest.raises(HandshakeError, match="'birch' is already in the run: is it started twice"):
        knock(keeper.where, "birch", CLUSTERS, timeout_s=5)
    assert keeper.events() == []


def test_nobody_comes_in_late(keeper: Door) -> None:
    keeper.begin()
    for attempt in (CLUSTERS, ("amber", "birch")):
        with pytest.raises(HandshakeError, match=r"refused cluster 'birch'"):
            knock(keeper.where, "birch", attempt, timeout_s=5)
    assert keeper.events() == []  # a stranger cannot disturb a run


def test_who_comes_for_the_next_run_waits_for_its_door(doors: dict[str, Door], keeper: Door) -> None:
    """A script that trains twice: this cluster is through with its first run, the door's has yet to notice."""
    keeper.begin()
    doors["birch"].send(Kind.LEAVE, "amber", {"reason": "its training is complete", "deliberate": True})
    doors["birch"].close()

    def next_run() -> Door:
        time.sleep(0.5)
        keeper.close()
        return keep_door(keeper.where, CLUSTERS, timeout_s=5)

    found = at_once({"birch": lambda: knock(keeper.where, "birch", CLUSTERS, timeout_s=10), "amber": next_run})
    try:
        until(lambda: "birch" in found["amber"].arrived())
    finally:
        for door in found.values():
            door.close()


# Telling


@pytest.mark.parametrize(("sender", "to"), [(a, b) for a in CLUSTERS for b in CLUSTERS if a != b])
def test_ports_go_from_any_cluster_to_any_other(doors: dict[str, Door], sender: str, to: str) -> None:
    port = "tag#0$description#example$port#40000$" + "x" * 400
    doors[sender].send(Kind.PORT, to, {"port": port})
    (event,) = events(doors[to])
    assert (event.kind, event.cluster, event.body["port"]) == (Kind.PORT, sender, port)
    for name in set(CLUSTERS) - {to}:
        assert doors[name].events() == []


@pytest.mark.parametrize("leaver", CLUSTERS)
def test_a_goodbye_is_relayed_and_what_follows_is_no_news(doors: dict[str, Door], leaver: str) -> None:
    others = [name for name in CLUSTERS if name != leaver]
    for name in others:
        doors[leaver].send(Kind.LEAVE, name, {"reason": "it failed", "deliberate": False})
    doors[leaver].close()
    for name in others:
        event = events(doors[name])[0]
        assert (event.kind, event.cluster, event.body["reason"]) == (Kind.LEAVE, leaver, "it failed")
    time.sleep(0.2)
    for name in others:
        assert [event for event in doors[name].events() if event.cluster == leaver] == []


@pytest.mark.parametrize("victim", CLUSTERS)
def test_a_death_is_known_to_all(doors: dict[str, Door], victim: str) -> None:
    doors[victim].close()
    for name in set(CLUSTERS) - {victim}:
        event = events(doors[name])[0]
        assert (event.kind, event.cluster) == (Kind.GONE, victim)
        assert "without a goodbye" in event.body["reason"]


def test_a_goodbye_to_one_does_not_hide_the_death_from_another(doors: dict[str, Door]) -> None:
    """Birch drops cedar for its silence, and dies later: amber must hear of that."""
    doors["birch"].send(Kind.LEAVE, "cedar", {"reason": "it goes on without this cluster", "deliberate": False})
    assert events(doors["cedar"])[0].kind is Kind.LEAVE
    doors["birch"].close()
    assert [(event.kind, event.cluster) for event in events(doors["amber"])] == [(Kind.GONE, "birch")]


def test_events_wake_who_waits_and_are_told_to_the_log(where: str) -> None:
    logged: list[Event] = []
    keeper = keep_door(where, CLUSTERS, timeout_s=5, on_event=logged.append)
    birch = knock(where, "birch", CLUSTERS, timeout_s=5)
    birch.send(Kind.PORT, "amber", {"port": "p"})
    until(lambda: logged)
    assert os.read(os.dup(keeper.fileno()), 1) == b"!"
    assert keeper.events() == logged
    birch.close()
    keeper.close()


# Strangers


HOSTILE = [
    b"GET / HTTP/1.1\r\nHost: nebula.example.org\r\nAccept: */*\r\n\r\n",
    bytes(100),
    os.urandom(4096),
    Frame(Kind.KNOCK, 2**60).pack(),
    Frame(Kind.KNOCK, LIMIT_BYTES + 1).pack(),
    message(Kind.KNOCK, b"not json"),
    message(Kind.KNOCK, b"[1, 2]"),
    message(Kind.KNOCK, b"[" * LIMIT_BYTES),
    message(Kind.KNOCK, b"\xff\xfe\xfd"),
    a_knock()[:-1] + b"?",
    message(Kind.PORT, {"to": "amber", "port": "x"}),
    message(Kind.GONE, {"from": "cedar", "to": "amber"}),
]


@pytest.mark.parametrize("data", HOSTILE)
def test_strangers_that_talk_nonsense_are_shown_out(doors: dict[str, Door], data: bytes) -> None:
    with call(doors["amber"].where) as connection:
        connection.sendall(data)
        assert is_closed(connection)
    doors["birch"].send(Kind.PORT, "cedar", {"port": "p"})
    assert [event.kind for event in events(doors["cedar"])] == [Kind.PORT]
    assert doors["amber"].events() == []


BODIES: list[Any] = [
    (Kind.PORT, {}),
    (Kind.PORT, {"to": ["amber"]}),
    (Kind.LEAVE, {"to": "mallory"}),
    (Kind.GONE, {"from": "cedar", "to": "amber"}),
    (Kind.WELCOME, {"arrived": ["cedar"]}),
    (Kind.KNOCK, {}),
    (Kind.BUCKET, {}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_a_member_that_talks_nonsense_is_gone(keeper: Door, kind: Kind, body: Any) -> None:
    with call(keeper.where) as connection:
        connection.sendall(a_knock() + message(kind, body))
        assert is_closed(connection)
    (event,) = events(keeper)
    assert (event.kind, event.cluster) == (Kind.GONE, "birch")
    assert keeper.arrived() == {"amber"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.WELCOME, {"arrived": 5}),
        (Kind.WELCOME, {"arrived": [["amber"]]}),
        (Kind.GONE, {"from": ["cedar"], "to": "birch"}),
        (Kind.PORT, {"from": "cedar"}),
        (Kind.KNOCK, {}),
    ],
)
def test_a_keeper_that_talks_nonsense_is_gone(where: str, kind: Kind, body: Any) -> None:
    host, port = where.split(":")
    with socket.create_server((host, int(port))) as listener:

        def keep() -> None:
            connection, _ = listener.accept()
            with connection:
                read_message(connection)
                connection.sendall(
                    message(Kind.WELCOME, {"arrived": ["amber", "birch"], "run": None}) + message(kind, body)
                )
                assert is_closed(connection)

        outcomes = at_once({"amber": keep, "birch": lambda: events_after_knock(where)})
    assert outcomes["amber"] is None
    assert [(event.kind, event.cluster) for event in outcomes["birch"]] == [(Kind.GONE, "amber")]


def events_after_knock(where: str) -> list[Event]:
    door = knock(where, "birch", CLUSTERS, timeout_s=5)
    found = events(door)
    door.close()
    return found


def test_nobody_speaks_for_another(doors: dict[str, Door]) -> None:
    doors["cedar"].close()
    events(doors["amber"]), events(doors["birch"])
    with call(doors["amber"].where) as connection:
        connection.sendall(a_knock("cedar"))
        until(lambda: doors["amber"].arrived() == set(CLUSTERS))
        connection.sendall(message(Kind.LEAVE, {"from": "amber", "to": "birch", "reason": "because"}))
        (event,) = events(doors["birch"])
    assert (event.kind, event.cluster) == (Kind.LEAVE, "cedar")


def test_the_silent_are_shown_out_and_cannot_keep_others_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "_STRANGER_S", 0.4)
    keeper = keep_door(where, CLUSTERS, timeout_s=5)
    before = threading.active_count()
    crowd = [call(where) for _ in range(200)]
    for connection in crowd[::2]:
        with contextlib.suppress(OSError):
            connection.sendall(a_knock()[:20])
    assert threading.active_count() == before
    assert sum(line.cluster is None for line in keeper._board.lines) <= MAX_STRANGERS
    birch = knock(where, "birch", CLUSTERS, timeout_s=10)
    assert all(is_closed(connection) for connection in crowd)
    for end in (*crowd, birch, keeper):
        end.close()


def test_a_refused_stranger_cannot_fill_our_memory(keeper: Door) -> None:
    with call(keeper.where) as connection, contextlib.suppress(OSError):
        for _ in range(2000):
            connection.sendall(a_knock("mallory"))
        assert all(len(line.outgoing) < 1 << 16 for line in keeper._board.lines)


def test_a_half_open_connection(keeper: Door) -> None:
    """The other side has closed its sending half after the knock: it is gone."""
    with call(keeper.where) as connection:
        connection.sendall(a_knock())
        assert read_message(connection)[0] is Kind.WELCOME
        connection.shutdown(socket.SHUT_WR)
        (event,) = events(keeper)
        assert (event.kind, event.cluster) == (Kind.GONE, "birch")
        assert is_closed(connection)


def test_a_reset_connection(keeper: Door) -> None:
    connection = call(keeper.where)
    connection.sendall(a_knock())
    assert read_message(connection)[0] is Kind.WELCOME
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    (event,) = events(keeper)
    assert event.kind is Kind.GONE
    assert "broke" in event.body["reason"]


def test_a_message_may_come_in_pieces(keeper: Door) -> None:
    with call(keeper.where) as connection:
        for at in range(len(a_knock())):
            connection.sendall(a_knock()[at : at + 1])
        assert read_message(connection) == (Kind.WELCOME, {"arrived": ["amber", "birch"], "run": None})


# Closing


def test_closing_delivers_what_is_queued_and_can_be_repeated(doors: dict[str, Door]) -> None:
    for number in range(20):
        doors["birch"].send(Kind.PORT, "cedar", {"port": str(number)})
    for _ in range(2):
        doors["birch"].close()
    found: list[str] = []
    until(lambda: len(found) >= 20 or found.extend(event.body.get("port", "") for event in doors["cedar"].events()))
    assert found[:20] == [str(number) for number in range(20)]


def test_closing_does_not_wait_for_who_does_not_read(keeper: Door) -> None:
    connection = call(keeper.where)
    connection.sendall(a_knock())
    until(lambda: keeper.arrived() == {"amber", "birch"})
    for _ in range(1500):
        keeper.send(Kind.PORT, "birch", {"port": "x" * 8000})
    start = time.monotonic()
    keeper.close(linger_s=0.3)
    assert time.monotonic() - start < 10
    assert not keeper._thread.is_alive()
    connection.close()


def test_no_thread_and_no_descriptor_is_left(where: str) -> None:
    def life() -> None:
        keeper = keep_door(where, CLUSTERS, timeout_s=5)
        others = [knock(where, name, CLUSTERS, timeout_s=5) for name in CLUSTERS[1:]]
        with pytest.raises(HandshakeError):
            knock(where, "birch", CLUSTERS, timeout_s=5)
        with call(where) as stranger:
            stranger.sendall(b"?" * 100)
            assert is_closed(stranger)
        for door in (*others, keeper):
            door.close()

    life()  # what is cached at first use
    process = psutil.Process()
    before = (process.num_fds(), threading.active_count())
    for _ in range(3):
        life()
    assert (process.num_fds(), threading.active_count()) == before


def forked(act: Callable[[], None]) -> int:
    """Run ``act`` in a forked child, which ends without any clean-up; returns its id."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            act()
        os._exit(0)
    return pid


def end(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_a_forked_worker_does_not_keep_the_door_open(where: str) -> None:
    """A trainer that is killed while its data workers live on is gone all the same."""
    keeper = keep_door(where, CLUSTERS, timeout_s=5)
    told, tell = os.pipe()

    def trainer() -> None:
        birch = knock(where, "birch", CLUSTERS, timeout_s=5)
        worker = forked(lambda: (birch.close(), signal.pause()))
        os.write(tell, struct.pack("i", worker))
        signal.pause()

    pid = forked(trainer)
    (worker,) = struct.unpack("i", os.read(told, 4))
    assert keeper.arrived() == {"amber", "birch"}
    assert keeper.events() == []
    end([pid])
    (event,) = events(keeper)
    assert (event.kind, event.cluster) == (Kind.GONE, "birch")
    assert psutil.pid_exists(worker)
    os.kill(worker, signal.SIGKILL)
    keeper.close()
    os.close(told)
    os.close(tell)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_the_keepers_worker_does_not_keep_the_port(where: str) -> None:
    keeper = keep_door(where, CLUSTERS, timeout_s=5)
    ready, tell = os.pipe()
    worker = forked(lambda: (os.write(tell, b"!"), signal.pause()))
    os.read(ready, 1)
    keeper.close()
    keep_door(where, CLUSTERS, timeout_s=5).close()
    end([worker])
    os.close(ready)
    os.close(tell)


# Coming back


def test_a_welcome_that_makes_no_sense_is_said_and_the_door_is_tried_again(where: str) -> None:
    caller = keep_door(where, CLUSTERS, "birch", timeout_s=5)
    sentences: list[str] = []
    with socket.create_server(("127.0.0.1", int(where.rpartition(":")[2]))) as listener:
        listener.settimeout(20)
        knocker = Knocker(caller, sentences.append)
        for arrived in (["nobody"], ["amber", "birch"]):
            connection, _ = listener.accept()
            connection.settimeout(20)
            assert read_message(connection)[0] is Kind.KNOCK
            connection.sendall(message(Kind.WELCOME, {"arrived": arrived, "run": None}))
            if "nobody" in arrived:
                assert is_closed(connection)
        until(lambda: caller.lines() == {"amber"})
        knocker.close()
        connection.close()
    caller.close()
    assert sentences == ["a WELCOME message must name clusters of the run, got ['nobody']"]


def test_a_line_that_comes_to_a_closed_door_is_closed(where: str) -> None:
    caller = keep_door(where, CLUSTERS, "birch", timeout_s=5)
    caller.close()
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    caller.adopt(Line(ours, "amber", leads_up=True), {"arrived": ["amber", "birch"], "run": None})
    assert is_closed(theirs)
    assert caller.lines() == set()
    theirs.close()
