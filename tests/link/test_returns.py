"""Lost clusters come back: real doors, couriers that are threads of this process, and a vector that is trained."""

from __future__ import annotations

import functools
import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Layout
from paddlenlp_nebula.errors import ChannelLost, HandshakeError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link import connector, entrance, returns
from paddlenlp_nebula.link.door import Door
from paddlenlp_nebula.link.entrance import Knocker, keep_door
from paddlenlp_nebula.link.frames import Kind, checksum
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.link.returns import Group, Invitation, Returns
from paddlenlp_nebula.rounds.comeback import Comeback
from paddlenlp_nebula.strategy.reunion import Plane, Reunited
from paddlenlp_nebula.transport import courier

from .clusters import NAMES
from .test_door import until
from .test_rendezvous import Courier, opened

pytestmark = pytest.mark.timeout(90)

MAX_STEPS = 10**9  # nobody gets there
FACTS = {"takes_back": True, "max_steps": MAX_STEPS}
NUMEL = 20


# Rank


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        (Group(("cedar", "delta"), 1), Group(("amber",), 99), True),
        (Group(("amber",), 99), Group(("cedar", "delta"), 1), False),
        (Group(("cedar",), 7), Group(("amber",), 6), True),
        (Group(("amber",), 7), Group(("cedar",), 7), True),
        (Group(("birch", "delta"), 3), Group(("amber", "cedar"), 3), False),
        (Group(("birch", "delta"), 4), Group(("amber", "cedar"), 3), True),
    ],
)
def test_who_takes_in_whom(ours: Group, theirs: Group, first: bool) -> None:
    assert ours.outranks(theirs, NAMES) is first
    assert theirs.outranks(ours, NAMES) is not first


def test_of_any_two_groups_exactly_one_takes_in_the_other() -> None:
    halves = [tuple(subset) for size in (1, 2, 3) for subset in itertools.combinations(NAMES, size)]
    for ours, theirs in itertools.product(halves, halves):
        if set(ours) & set(theirs):
            continue
        for number in (3, 4, 5):
            one, other = Group(ours, 4), Group(theirs, number)
            assert one.outranks(other, NAMES) is not other.outranks(one, NAMES)


# What guests say


class Mortal(Courier):
    """A courier that can be killed."""

    killed = False

    @property
    def loss(self) -> str | None:
        return "its courier was killed" if self.killed else self.channel.loss if self.channel is not None else None

    def progress(self) -> None:
        if self.killed:
            raise ChannelLost(self.peer, "its courier was killed")
        super().progress()


@pytest.fixture
def wheres(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(courier, "CourierChannel", Mortal)
    monkeypatch.setattr(returns, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(Courier, "broken", set())
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    return found


@pytest.fixture
def alone(wheres: list[str]) -> Iterator[Returns]:
    """Those of birch, which has lost everybody."""
    door = keep_door(",".join(wheres), NAMES, "birch", timeout_s=5)
    link = Link("birch", NAMES, {}, timeout_s=5, door=door)
    found = Returns(link, None, lambda sentence: None)
    yield found
    found.close()
    link.close()


def invite(ours: Returns, *members: str, by: str, number: int = 9, epoch: int = 3) -> None:
    ours._hear(by, Kind.INVITE, {"members": list(members), "number": number, "epoch": epoch})


def test_an_invitation_counts_once_all_members_have_sent_it(alone: Returns) -> None:
    group = ("amber", "birch", "cedar")
    invite(alone, *group, by="amber")
    assert alone.invitation(9) is None
    invite(alone, *group, by="cedar", epoch=4)
    assert alone.invitation(9) is None
    invite(alone, *group, by="cedar")
    assert alone.invitation(9) == Invitation(group, 9, 3)


def test_an_invitation_is_withdrawn_with_the_group(alone: Returns) -> None:
    invite(alone, "amber", "birch", by="amber")
    assert alone.invitation(9) is not None
    alone._hear("amber", Kind.PRESENT, {"members": ["amber", "cedar"], "number": 9})
    assert alone.invitation(9) is None


def test_an_invitation_holds_although_we_have_come_further_meanwhile(alone: Returns) -> None:
    invite(alone, "birch", "cedar", by="cedar", number=9)
    assert alone.invitation(9) == alone.invitation(12) == Invitation(("birch", "cedar"), 9, 3)


def test_an_invitation_by_a_group_that_is_smaller_by_now_does_not_count(alone: Returns) -> None:
    invite(alone, "amber", "birch", by="amber", number=99)
    alone._link.members = ("birch", "cedar")
    assert alone.invitation(9) is None


@pytest.mark.parametrize(
    ("kind", "note", "words"),
    [
        (Kind.PRESENT, {}, "must name clusters of the run"),
        (Kind.PRESENT, {"members": "amber", "number": 1}, "must name clusters of the run"),
        (Kind.PRESENT, {"members": ["amber", "zebra"], "number": 1}, "must name clusters of the run"),
        (Kind.PRESENT, {"members": ["amber", ["amber"]], "number": 1}, "must name clusters of the run"),
        (Kind.PRESENT, {"members": ["cedar"], "number": 1}, "must be a member of its own group"),
        (Kind.PRESENT, {"members": [], "number": 1}, "must be a member of its own group"),
        (Kind.PRESENT, {"members": ["amber", "amber"], "number": 1}, "name each member of its group once"),
        (
            Kind.INVITE,
            {"members": ["amber", "birch", "amber"], "number": 1, "epoch": 1},
            "name each member of its group once",
        ),
        (Kind.PRESENT, {"members": ["amber"]}, "how far it has come"),
        (Kind.PRESENT, {"members": ["amber"], "number": -1}, "how far it has come"),
        (Kind.PRESENT, {"members": ["amber"], "number": 1 << 64}, "how far it has come"),
        (Kind.PRESENT, {"members": ["amber"], "number": 1.5}, "how far it has come"),
        (Kind.INVITE, {"members": ["amber", "birch"], "number": "1", "epoch": 1}, "how far it has come"),
        (Kind.INVITE, {"members": ["amber", "birch"], "number": 1}, "must invite into an epoch"),
        (Kind.INVITE, {"members": ["amber", "birch"], "number": 1, "epoch": -1}, "must invite into an epoch"),
        (Kind.INVITE, {"members": ["amber", "birch"], "number": 1, "epoch": 1 << 31}, "must invite into an epoch"),
        (Kind.INVITE, {"members": ["amber", "cedar"], "number": 1, "epoch": 1}, "must invite this cluster"),
        (Kind.BUCKET, {"members": ["amber"], "number": 1}, "is no member and must not send BUCKET"),
        (Kind.ACCEPT, {}, "must name clusters of the run"),
    ],
)
def test_what_no_guest_may_say(alone: Returns, kind: Kind, note: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        alone._hear("amber", kind, note)


# Whole lives


class Vector:
    """A strategy of one vector, see `reunion.Member`."""

    turns = 0

    def __init__(self) -> None:
        self.values = np.zeros(NUMEL, np.float32)
        half = NUMEL // 2
        cuts = [(0, half), (half, NUMEL)]
        buckets = [Bucket(i, a, b, ((i, 0, b - a),), Layout.flat(b - a)) for i, (a, b) in enumerate(cuts)]
        self.exchange: Any = SimpleNamespace(buckets=buckets, parameter_digest=self.digest, diverged=False)

    def digest(self) -> str:
        return f"{checksum(self.values.tobytes()):016x}"

    def settle(self) -> None:
        pass

    def brings(self, bucket: Bucket) -> Any:
        return self.values[bucket.start : bucket.stop].copy()

    def planes(self) -> list[Plane]:
        return []

    def move(self, parameters: Any, turns: int, states: Sequence[Any]) -> Any:
        self.values = parameters.copy()
        return parameters


class Death(Exception):
    """The end of one."""


class Cluster:
    """Trains in a thread: a note to all in each step, and a number that its vector grows by when it is alone."""

    def __init__(self, link: Link, step: int = 0) -> None:
        assert link.door is not None
        self.link, self.step = link, step
        self.sentences: list[str] = []
        self.party = Party(link, on_loss="continue", quorum=1, report=self.sentences.append)
        link.door.begin(dict(FACTS))
        self.party.returns = self.returns = Returns(link, None, self.sentences.append)
        self.strategy = Vector()
        self.returned: list[Reunited] = []
        self.todo: list[Callable[[Cluster], Any]] = []
        self.stopped = threading.Event()
        self.outcome: BaseException | None = None
        arguments = SimpleNamespace(
            cluster_name=link.cluster, hides_updates=False, drops_work_done_alone=False, sync_staleness_limit=10**9
        )
        self.run: Any = SimpleNamespace(party=self.party, arguments=arguments, returned=self.returned.append)
        self.comeback = Comeback(self.run)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.live, name=f"cluster-{link.cluster}", daemon=True)
        self.thread.start()

    # Living

    def live(self) -> None:
        try:
            while not self.stopped.is_set() and self.party.ended is None:
                while self.todo:
                    self.todo.pop(0)(self)
                self.train()
                time.sleep(0.005)
            self.link.leave("its training is complete", deliberate=True, linger_s=1.0)
        except BaseException as error:
            self.outcome = error
        finally:
            self.returns.close()
            self.link.close()

    def train(self) -> None:
        self.step += 1
        self.comeback.history.work += 1
        guest = None
        if self.link.peers:
            notes = self.party.together(
                lambda number: all_gather_notes(self.link, {"guests": self.party.candidates()}, round=number)
            )
            seen = set.intersection(*(set(note["guests"]) for note in notes.values()))
            guest = next((name for name in self.link.clusters if name in seen), None)
            if len(notes) > 1:
                self.comeback.history.note(self.party.number, self.strategy.digest(), list(notes))
        else:
            self.strategy.values += 1
        self.run.ended, self.run.number = self.party.ended, self.party.number
        if (newcomer := self.comeback.due(guest)) is not None:
            self.comeback.meet(newcomer, self.step, {"max_steps": MAX_STEPS}, self.strategy, None)

    def end(self) -> None:
        self.stopped.set()
        self.thread.join(20)
        assert not self.thread.is_alive()


def die(cluster: Cluster) -> None:
    raise Death


def losing(*peers: str) -> Callable[[Cluster], None]:
    """The couriers to these are killed, the doors see nothing."""

    def lose(cluster: Cluster) -> None:
        for peer in peers:
            if peer in cluster.link.channels:
                cluster.link.channels[peer].killed = True  # type: ignore[attr-defined]

    return lose


def born(name: str, names: Sequence[str], where: str) -> Cluster:
    return Cluster(opened(name, names, where))


class World:
    """Clusters by name."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        self.names, self.where = tuple(names), where
        self.clusters: dict[str, Cluster] = {}
        self.bear(*names)

    def __getitem__(self, name: str) -> Cluster:
        return self.clusters[name]

    def bear(self, *names: str) -> None:
        """At the same time."""
        errors = []

        def one(name: str) -> None:
            try:
                self.clusters[name] = born(name, self.names, self.where)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors, errors

    def kill(self, name: str) -> None:
        self[name].todo.append(die)
        self[name].thread.join(20)
        assert isinstance(self.clusters.pop(name).outcome, Death)

    def are_together(self, *names: str, timeout_s: float = 30.0) -> None:
        """Until these are a group, and have done three more exchanges."""
        wanted = tuple(name for name in self.names if name in names)

        def members() -> set[tuple[str, ...]]:
            return {self[name].link.members for name in wanted}

        until(lambda: self.alive(wanted) and members() == {wanted}, timeout_s)
        goal = 3 + max(self[name].party.number for name in wanted)
        until(lambda: self.alive(wanted) and all(self[name].party.number >= goal for name in wanted), timeout_s)
        assert members() == {wanted}

    def alive(self, names: Sequence[str]) -> bool:
        for name in names:
            assert self[name].outcome is None, (name, self[name].outcome, self[name].sentences)
        return True

    def end(self) -> dict[str, Any]:
        """All finish; their vectors."""
        for cluster in self.clusters.values():
            cluster.stopped.set()
        for cluster in self.clusters.values():
            cluster.end()
            assert cluster.outcome is None, (cluster.outcome, cluster.sentences)
        return {name: cluster.strategy.values.tobytes() for name, cluster in self.clusters.items()}


def counts(world: World) -> dict[str, int]:
    """How many reunions each has been through, as long as all live."""
    assert world.alive(list(world.clusters))
    return {name: len(cluster.returned) for name, cluster in world.clusters.items()}


def _have_returned(world: World, before: dict[str, int]) -> bool:
    """All of them once more."""
    return all(count > before[name] for name, count in counts(world).items())


def newcomers(world: World) -> dict[str, list[str]]:
    return {name: [found.newcomer for found in cluster.returned] for name, cluster in world.clusters.items()}


@pytest.mark.parametrize("side", ["amber", "birch"])
def test_a_channel_is_lost_and_both_come_back_together(wheres: list[str], side: str) -> None:
    world = World(NAMES[:2], wheres[0])
    world.are_together("amber", "birch")
    for _ in range(2):  # and again
        before = counts(world)
        world[side].todo.append(losing("amber", "birch"))
        until(functools.partial(_have_returned, world, before), 30)
        world.are_together("amber", "birch")
    assert len(set(world.end().values())) == 1
    for cluster in world.clusters.values():
        assert any("was lost after exchange" in sentence for sentence in cluster.sentences)
        for found in cluster.returned:
            assert found.members == NAMES[:2]
            assert found.common is not None


def test_one_of_three_loses_both_others(wheres: list[str]) -> None:
    world = World(NAMES[:3], wheres[0])
    world.are_together(*NAMES[:3])
    world["amber"].todo.append(losing("birch", "cedar"))
    until(lambda: all(counts(world).values()), 30)
    world.are_together(*NAMES[:3])
    assert len(set(world.end().values())) == 1


@pytest.mark.parametrize("attempt", range(2))  # who invites whom depends on who comes first
def test_two_groups_of_two(wheres: list[str], attempt: int) -> None:
    world = World(NAMES, wheres[0])
    world.are_together(*NAMES)
    for name in ("amber", "birch"):
        world[name].todo.append(losing("cedar", "delta"))
    for name in ("cedar", "delta"):
        world[name].todo.append(losing("amber", "birch"))
    until(lambda: all(counts(world).values()), 30)
    world.are_together(*NAMES)
    assert len(set(world.end().values())) == 1


def test_all_are_alone(wheres: list[str]) -> None:
    world = World(NAMES, wheres[0])
    world.are_together(*NAMES)
    for name in NAMES:
        world[name].todo.append(losing(*NAMES))
    until(lambda: all(counts(world).values()), 30)
    world.are_together(*NAMES)
    assert len(set(world.end().values())) == 1


@pytest.mark.parametrize("victim", ["amber", "birch"])
def test_one_is_started_anew(wheres: list[str], victim: str) -> None:
    world = World(NAMES[:2], wheres[0])
    world.are_together("amber", "birch")
    world.kill(victim)
    (other,) = world.clusters
    until(lambda: world[other].link.members == (other,))
    world.bear(victim)
    door = world[victim].link.door
    assert door is not None
    assert door.theirs == FACTS
    until(lambda: all(counts(world).values()), 30)
    world.are_together("amber", "birch")
    assert newcomers(world) == {"amber": [victim], "birch": [victim]}
    assert world[victim].returned[0].common is None
    assert len(set(world.end().values())) == 1


@pytest.mark.parametrize("victim", ["amber", "cedar"])
def test_one_of_three_is_started_anew(wheres: list[str], victim: str) -> None:
    world = World(NAMES[:3], wheres[0])
    world.are_together(*NAMES[:3])
    world.kill(victim)
    left = tuple(world.clusters)
    world.are_together(*left)
    world.bear(victim)
    until(lambda: all(counts(world).values()), 30)
    world.are_together(*NAMES[:3])
    assert newcomers(world) == {name: [victim] for name in (*left, victim)}
    assert len(set(world.end().values())) == 1


def test_another_clusters_door_serves_when_the_first_is_gone(wheres: list[str]) -> None:
    world = World(NAMES[:3], ",".join(wheres[:2]))
    world.are_together(*NAMES[:3])
    world.kill("amber")
    world.are_together("birch", "cedar")
    world["cedar"].todo.append(losing("birch"))
    until(lambda: all(counts(world).values()), 30)
    world.are_together("birch", "cedar")
    world.kill("cedar")
    until(lambda: world["birch"].link.members == ("birch",))
    world.bear("cedar")  # which finds nobody at the first door
    world.are_together("birch", "cedar")
    world.bear("amber")
    world.are_together(*NAMES[:3])
    assert len(set(world.end().values())) == 1


def test_a_guest_that_dies_while_it_is_one(wheres: list[str]) -> None:
    world = World(NAMES[:3], wheres[0])
    world.are_together(*NAMES[:3])
    held = threading.Event()
    asked = threading.Event()

    def hesitates(cluster: Cluster) -> None:
        """Lost, back as a guest, invited, and then gone without an answer."""
        for peer in cluster.link.peers:
            cluster.link.drop(PeerLost(peer, "its courier was killed"))
        deadline = time.monotonic() + 20
        while not cluster.returns._invitations and time.monotonic() < deadline:
            cluster.returns.invitation(cluster.party.number)
            time.sleep(0.01)
        asked.set()
        held.wait(20)
        raise Death

    world["cedar"].todo.append(hesitates)
    assert asked.wait(40)
    held.set()
    world["cedar"].thread.join(20)
    assert isinstance(world.clusters.pop("cedar").outcome, Death)
    world.are_together("amber", "birch")
    assert counts(world) == {"amber": 0, "birch": 0}
    world.bear("cedar")
    world.are_together(*NAMES[:3])
    assert len(set(world.end().values())) == 1


def test_the_connector_gives_up_and_tries_again(wheres: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_ATTEMPT_S", 0.2)
    monkeypatch.setattr(connector, "_RETRY_S", 0.1)
    world = World(NAMES[:2], wheres[0])
    world.are_together("amber", "birch")
    Courier.broken.update(("amber", "birch"))
    world["amber"].todo.append(losing("birch"))
    until(lambda: world["birch"].link.members == ("birch",))
    time.sleep(2.0)
    assert counts(world) == {"amber": 0, "birch": 0}
    assert len(Courier.open) <= 4
    Courier.broken.clear()
    until(lambda: all(counts(world).values()), 30)
    world.are_together("amber", "birch")
    world.end()


def test_a_run_that_takes_nobody_back_says_why(wheres: list[str]) -> None:
    world = World(NAMES[:2], wheres[0])
    world.are_together("amber", "birch")
    door = world["amber"].link.door
    assert door is not None
    door.begin({"takes_back": "its optimizer keeps everything to itself"})
    world.kill("birch")
    until(lambda: world["amber"].link.members == ("amber",))
    with pytest.raises(HandshakeError, match="already started without it: its optimizer keeps everything to itself"):
        opened("birch", NAMES[:2], wheres[0])
    world.end()


def test_nothing_is_left_open(wheres: list[str]) -> None:
    def life() -> None:
        world = World(NAMES[:3], ",".join(wheres[:2]))
        world.are_together(*NAMES[:3])
        world["birch"].todo.append(losing("amber", "cedar"))
        until(lambda: all(counts(world).values()), 30)
        world.kill("cedar")
        world.are_together("amber", "birch")
        world.end()
        gc.collect()
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("nebula-", "cluster-"))])

    life()
    before = (psutil.Process().num_fds(), threading.active_count())
    for _ in range(2):
        life()
    until(lambda: gc.collect() >= 0 and (psutil.Process().num_fds(), threading.active_count()) == before)
    assert not Courier.open


# Knocking


@pytest.fixture
def caller(wheres: list[str]) -> Iterator[Door]:
    door = keep_door(",".join(wheres[:2]), NAMES[:3], "cedar", timeout_s=5)
    yield door
    door.close()


def test_knocking_grows_rarer_and_each_door_has_its_own_pace(caller: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_RETRY_S", 0.01)
    monkeypatch.setattr(entrance, "_LONGEST_RETRY_S", 0.2)
    knocks: dict[str, list[float]] = {"amber": [], "birch": []}

    def nobody(door: Door, keeper: str, where: str, left_s: float) -> Any:
        knocks[keeper].append(time.monotonic())
        raise ConnectionRefusedError

    monkeypatch.setattr(entrance, "_introduce", nobody)
    knocker = Knocker(caller, lambda sentence: None)
    until(lambda: min(map(len, knocks.values())) >= 14)
    knocker.close()
    for times in knocks.values():
        gaps = np.diff(times)
        assert gaps[-4:].mean() > 2 * gaps[:3].mean()
        assert gaps[-4:].mean() >= 0.7 * 0.2


def test_a_line_that_comes_back_is_adopted(caller: Door, wheres: list[str]) -> None:
    knocker = Knocker(caller, lambda sentence: None)
    time.sleep(0.5)
    assert caller.lines() == set()
    keeper = keep_door(",".join(wheres[:2]), NAMES[:3], "birch", timeout_s=5)
    until(lambda: caller.lines() == {"birch"} and keeper.lines() == {"cedar"})
    keeper.close()
    until(lambda: caller.lines() == set())
    keeper = keep_door(",".join(wheres[:2]), NAMES[:3], "birch", timeout_s=5)
    until(lambda: caller.lines() == {"birch"})
    knocker.close()
    keeper.close()


def test_a_refusal_is_said(caller: Door, wheres: list[str]) -> None:
    sentences: list[str] = []
    keeper = keep_door(",".join(wheres[:2]), NAMES[:3], "birch", timeout_s=5)
    keeper.begin({"takes_back": "it has no room"})
    knocker = Knocker(caller, sentences.append)
    until(lambda: sentences)
    knocker.close()
    keeper.close()
    assert "refused cluster 'cedar': the run has already started without it: it has no room" in sentences[0]


def test_the_first_cluster_knocks_nowhere(wheres: list[str]) -> None:
    door = keep_door(wheres[0], NAMES[:2], timeout_s=5)
    knocker = Knocker(door, lambda sentence: None)
    assert not knocker._thread.is_alive()
    knocker.close()
    door.close()


def test_closing_does_not_wait_for_a_door_that_does_not_answer(caller: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hangs(door: Door, keeper: str, where: str, left_s: float) -> Any:
        inside.set()
        leave.wait(20)
        raise NebulaError("no")

    monkeypatch.setattr(entrance, "_introduce", hangs)
    knocker = Knocker(caller, lambda sentence: None)
    assert inside.wait(20)
    start = time.monotonic()
    knocker.close()
    assert time.monotonic() - start < 2
    leave.set()
