"""A cluster comes back in the middle of rounds, whatever these are made of; the members are threads over loopback."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.backend.backend import Backend
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.link.returns import Invitation
from paddlenlp_nebula.rounds.base import Rounds
from paddlenlp_nebula.rounds.comeback import Comeback, Takeover, optimizer_state
from paddlenlp_nebula.rounds.local_steps import LocalStepsRounds
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.history import History
from paddlenlp_nebula.strategy.local_steps import LocalWork, apply_merge
from paddlenlp_nebula.strategy.opening import Opening, common_guest
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.strategy.pace import Pace
from paddlenlp_nebula.strategy.reunion import Reunited
from paddlenlp_nebula.tensors import write

from ..link.clusters import NAMES, at_once, meet
from ..strategy.conftest import _small_buckets  # noqa: F401 (a fixture)
from ..strategy.test_backends import DEVICE, DEVICES, HOSTS, MIXED, Unlike

pytestmark = pytest.mark.timeout(60)

FIELDS = {"selection": "abc"}


class Summons:
    """What `Returns` does for a strategy, without doors: the guest is there, and everybody knows it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.invited: Invitation | None = None
        self.guests: tuple[str, ...] = ()

    def candidates(self, number: int) -> tuple[str, ...]:
        return self.guests

    def invitation(self, number: int) -> Invitation | None:
        return self.invited

    def invite(self, guest: str, number: int) -> None:
        self._link.admit([*self._link.members, guest], 5)

    patience_s = 20.0

    def met(self, guest: str) -> None:
        self.guests = ()

    def missed(self, guest: str, seconds: float) -> None:
        self.guests = ()

    def accept(self, invitation: Invitation) -> None:
        self._link.admit(invitation.members, invitation.epoch)
        self._link.post(Kind.ACCEPT, pack_note({}))


class Cluster(Unlike):
    """A member that can be met."""

    def __init__(self, link: Link, backend: Backend, spec: str, *args: Any, limit: int = 64, **more: Any) -> None:
        super().__init__(link, backend, spec, *args, **more)
        self.summons = Summons(link)
        self.party.returns = self.summons  # type: ignore[assignment]
        self.party._on_loss = "continue"
        self.returned: list[Reunited] = []
        arguments = SimpleNamespace(
            cluster_name=link.cluster,
            hides_updates=False,
            drops_work_done_alone=False,
            sync_staleness_limit=limit,
            sync_timeout_s=30.0,
        )
        self.run = SimpleNamespace(
            party=self.party, arguments=arguments, ended=None, number=0, returned=self.returned.append
        )
        self.comeback = Comeback(self.run)  # type: ignore[arg-type]

    def trains(self, numbers: Sequence[int], seed: int, work: float, *, final: bool = False) -> None:
        """Rounds, noted as the Trainer's callbacks do."""
        for number in numbers:
            self.comeback.history.work += work
            self.merge(number, seed, final=final and number == numbers[-1])
            self.run.number = self.party.number
            if len(self.link.members) > 1:
                digest = self.exchange.parameter_digest()
                self.comeback.history.note(self.party.number, digest, self.link.members)

    def drift(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for parameter in self.selection.parameters:
            write(parameter, parameter.numpy().ravel() + rng.standard_normal(parameter.size, dtype=np.float32))

    def meets(self, newcomer: str, step: int, states: Selection | None = None) -> Takeover | None:
        """Come together, and take over what there is."""
        takeover = self.comeback.meet(newcomer, step, FIELDS, self.local_steps, states)
        if takeover is not None and takeover.parameters is not None:
            offsets = self.selection.offsets
            for index, parameter in enumerate(self.selection.parameters):
                write(parameter, takeover.parameters[offsets[index] : offsets[index + 1]])
        return takeover

    def anchored(self) -> Any:
        return np.array(self.backend.to_host(self.local_steps.anchor))


def clusters_of(backends: Sequence[Backend], spec: str = "fp32", *args: Any, **more: Any) -> dict[str, Cluster]:
    links = meet(*NAMES[: len(backends)])
    return {
        name: Cluster(link, backend, spec, *args, **more)
        for (name, link), backend in zip(links.items(), backends, strict=True)
    }


def all_do(group: dict[str, Cluster], act: Callable[[Cluster, int], Any]) -> dict[str, Any]:
    acts = {name: functools.partial(act, cluster, i) for i, (name, cluster) in enumerate(group.items())}
    outcomes = at_once(acts, timeout_s=50)
    assert not [outcome for outcome in outcomes.values() if isinstance(outcome, BaseException)], outcomes
    return outcomes


def part(group: dict[str, Cluster], loner: str) -> dict[str, Cluster]:
    """A cluster goes away; the others, who stay together."""
    others = {name: cluster for name, cluster in group.items() if name != loner}
    for cluster in others.values():
        cluster.link.admit(list(others), 3)
    group[loner].link.admit([loner], 3)
    return others


def summon(group: dict[str, Cluster], newcomer: str) -> None:
    number = next(cluster.party.number for name, cluster in group.items() if name != newcomer)
    group[newcomer].summons.invited = Invitation(tuple(group), number, 5)


@pytest.mark.parametrize("newcomer", ["amber", "cedar"])
@pytest.mark.parametrize(
    ("backends", "spec", "fragments", "more"),
    [
        ((HOST,) * 3, "fp32", 1, {"outer": OuterOptimizer("average")}),
        ((HOST, DEVICE, HOST), "fp32", 1, {}),
        ((DEVICE, HOST, DEVICE), "bf16", 2, {}),
        ((HOST, HOST, DEVICE), "topk:1/4,2bit", 1, {"keep_unsent": True}),
        ((DEVICE, HOST, HOST), "topk:1/4,2bit", 2, {"keep_unsent": True, "final_codec": codec_from_spec("int8")}),
        ((HOST, HOST, HOST), "int8", 2, {"final_codec": codec_from_spec("int8")}),
    ],
)
def test_rounds_go_on_from_a_common_anchor(
    newcomer: str, backends: Sequence[Backend], spec: str, fragments: int, more: dict[str, Any]
) -> None:
    group = clusters_of(backends, spec, fragments, **more)
    all_do(group, lambda cluster, i: cluster.trains(range(1, 5), i, 10.0))
    hosts = part(group, newcomer)
    all_do(hosts, lambda cluster, i: cluster.trains(range(5, 8), i, 10.0))
    for number in range(5, 8):
        group[newcomer].drift(1000 + number)
    group[newcomer].comeback.history.work += 40.0
    brought = group[newcomer].flat().copy()
    before = {name: cluster.flat().copy() for name, cluster in hosts.items()}
    held = {name: cluster.anchored() for name, cluster in hosts.items()}
    unsent = {name: group[name].anchored() * 0 for name in group}
    for name, cluster in hosts.items():
        for bucket in cluster.exchange.buckets:
            left = cluster.exchange.unsent(bucket.index)
            if left is not None and more.get("keep_unsent"):
                unsent[name][bucket.start : bucket.stop] = cluster.backend.to_host(left)

    assert {cluster.comeback.due(newcomer) for cluster in hosts.values()} == {newcomer}
    summon(group, newcomer)
    assert group[newcomer].comeback.due() == newcomer
    takeovers = all_do(group, lambda cluster, i: cluster.meets(newcomer, 7))

    share = np.float32(40.0 / (40.0 + 2 * 30.0))
    first = next(iter(hosts))
    expected = share * brought + (np.float32(1) - share) * held[first]
    for name, cluster in group.items():
        assert cluster.anchored().tobytes() == expected.tobytes(), name
        assert takeovers[name].step == 7
        (found,) = cluster.returned
        assert (found.share, found.work, found.apart) == (float(share), 40.0, 3)
        assert cluster.local_steps.turns == 7
        assert cluster.link.members == tuple(group)
        assert cluster.comeback.history.entries()[-1].digest == cluster.exchange.parameter_digest()
    assert group[newcomer].flat().tobytes() == expected.tobytes()
    for (
        name,
        cluster,
    ) in hosts.items():  # what it has done since the last round of a fragment is kept, and what is unsent
        change = before[name] - held[name] - unsent[name]
        np.testing.assert_allclose(cluster.flat(), expected + unsent[name] + change, rtol=1e-5, atol=1e-5)
    if group[first].local_steps._velocity is not None:
        velocities = {cluster.backend.to_host(cluster.local_steps._velocity).tobytes() for cluster in group.values()}
        assert len(velocities) == 1

    all_do(group, lambda cluster, i: cluster.trains(range(8, 12), i, 10.0, final=True))
    all_do(group, lambda cluster, i: cluster.local_steps.compare_final(11))
    assert len({cluster.flat().tobytes() for cluster in group.values()}) == 1


@pytest.mark.parametrize("backends", [HOSTS, MIXED, DEVICES])
@pytest.mark.parametrize("newcomer", ["amber", "birch"])
def test_two_who_were_alone(backends: tuple[Backend, ...], newcomer: str) -> None:
    """The host, too, brings what it has done alone, and what was unsent by then is none of it any more."""
    group = clusters_of(backends, "topk:1/4,2bit", 2, keep_unsent=True)
    all_do(group, lambda cluster, i: cluster.trains(range(1, 4), i, 10.0))
    (host,) = part(group, newcomer).values()
    for number in range(4, 7):
        for i, cluster in enumerate(group.values()):
            cluster.trains([number], i, 10.0 if cluster is host else 30.0)
    flats = {name: cluster.flat().copy() for name, cluster in group.items()}
    host.summons.guests = (newcomer,)
    assert host.comeback.due() == newcomer
    summon(group, newcomer)
    all_do(group, lambda cluster, i: cluster.meets(newcomer, 6))
    share = np.float32(0.75)
    expected = share * flats[newcomer] + (np.float32(1) - share) * flats[host.link.cluster]
    for cluster in group.values():
        assert cluster.flat().tobytes() == cluster.anchored().tobytes() == expected.tobytes()
    all_do(group, lambda cluster, i: cluster.trains(range(7, 9), i, 10.0))
    assert group["amber"].anchored().tobytes() == group["birch"].anchored().tobytes()


def test_a_fragments_own_steps_are_kept() -> None:
    """Two fragments: one has just been merged, the other one's changes have not travelled yet."""
    group = clusters_of((HOST,) * 3, "fp32", 2, outer=OuterOptimizer("average"))
    all_do(group, lambda cluster, i: cluster.trains([1, 2], i, 10.0))
    hosts = part(group, "cedar")
    all_do(hosts, lambda cluster, i: cluster.trains([3], i, 10.0))
    changes = {name: cluster.flat() - cluster.anchored() for name, cluster in hosts.items()}
    travelled = [bucket for bucket in group["amber"].exchange.buckets if bucket.index % 2 == 0]
    assert not any(change[b.start : b.stop].any() for change in changes.values() for b in travelled)
    assert all(change.any() for change in changes.values())
    group["cedar"].drift(99)
    group["cedar"].comeback.history.work += 20
    summon(group, "cedar")
    all_do(group, lambda cluster, i: cluster.meets("cedar", 3))
    for name, cluster in hosts.items():
        np.testing.assert_allclose(cluster.flat() - cluster.anchored(), changes[name], atol=1e-6)
    assert not (group["cedar"].flat() - group["cedar"].anchored()).any()


def test_who_comes_to_the_last_step_by_a_return_merges_what_it_has_left() -> None:
    """One that is done waits for the others, which are in the middle of it, and is taken in: all are done then."""
    group = clusters_of((HOST,) * 3, "fp32", 2, outer=OuterOptimizer("average"))
    all_do(group, lambda cluster, i: cluster.trains([1, 2], i, 10.0))
    hosts = part(group, "cedar")
    all_do(hosts, lambda cluster, i: cluster.trains([3], i, 10.0))
    summon(group, "cedar")
    takeovers = all_do(group, lambda cluster, i: cluster.meets("cedar", 9 if cluster.link.cluster == "cedar" else 3))
    assert {takeover.step for takeover in takeovers.values()} == {9}
    assert len({cluster.flat().tobytes() for cluster in group.values()}) == 3

    def ends(cluster: Cluster, i: int) -> None:
        rounds = LocalStepsRounds.__new__(LocalStepsRounds)
        rounds._run, rounds._max_steps, rounds._pace, rounds._fragments = cluster.run, 9, Pace.parse("4"), 2  # type: ignore[assignment]
        rounds._final = True  # a last round has been, after which this cluster was lost
        rounds._jump = 9
        rounds._met()
        ended: list[int] = []

        def merge(step: int, *, final: bool) -> None:
            merged = cluster.local_steps.merge(LocalWork(step, 0.0, final=final))
            parameters = cluster.selection.parameters
            apply_merge(
                cluster.selection,
                cluster.exchange.buckets,
                merged.parts,
                merged.values,
                lambda index, values: write(parameters[index], values),
            )
            rounds._final = merged.final
            ended.append(step)

        rounds._merge = merge  # type: ignore[assignment,method-assign]
        for _ in ("on_epoch_end", "on_train_end"):
            rounds.before_end(9)
        assert ended == [9]

    all_do(group, ends)
    assert len({cluster.flat().tobytes() for cluster in group.values()}) == 1


def test_what_came_too_late_is_dropped() -> None:
    group = clusters_of((HOST, DEVICE, HOST), limit=2)
    all_do(group, lambda cluster, i: cluster.trains([1, 2], i, 10.0))
    hosts = part(group, "birch")
    all_do(hosts, lambda cluster, i: cluster.trains([3, 4, 5], i, 10.0))
    group["birch"].trains([3], 1, 1000.0)
    summon(group, "birch")
    before = {name: cluster.flat().tobytes() for name, cluster in group.items()}
    takeovers = all_do(group, lambda cluster, i: cluster.meets("birch", 3 if cluster.link.cluster == "birch" else 5))
    assert [takeover.step for takeover in takeovers.values()] == [5, 5, 5]
    assert [takeover.parameters is None for takeover in takeovers.values()] == [True, False, True]
    for name, cluster in group.items():
        assert (cluster.returned[0].share, cluster.returned[0].work) == (0, 1000.0)
        assert (cluster.flat().tobytes() == before[name]) is (name != "birch")
        assert cluster.anchored().tobytes() == group["amber"].anchored().tobytes()
    # Its own past ends where they parted: another parting finds the common rounds from here on.
    numbers = [entry.number for entry in group["birch"].comeback.history.entries()]
    assert numbers == [1, 2, 6]
    assert group["birch"].comeback.history.work == 1020.0


def test_the_newcomers_state_of_the_optimizer_is_the_donors() -> None:
    group = clusters_of((HOST,) * 3)
    all_do(group, lambda cluster, i: cluster.trains([1, 2], i, 10.0))
    part(group, "amber")
    group["amber"].trains([3], 0, 10.0)
    moments = {name: Unlike(cluster.link, HOST, "fp32").selection for name, cluster in group.items()}
    for i, selection in enumerate(moments.values()):
        for parameter in selection.parameters:
            write(parameter, np.full(parameter.size, i > 0, dtype=np.float32))
    summon(group, "amber")
    takeovers = all_do(group, lambda cluster, i: cluster.meets("amber", 3, moments[cluster.link.cluster]))
    numel = moments["amber"].numel
    assert takeovers["amber"].states.tobytes() == np.ones(numel, np.float32).tobytes()
    assert takeovers["birch"].states is takeovers["cedar"].states is None
    assert takeovers["amber"].outline() == {"step": 3, "moves": True, "adopts": True}
    assert takeovers["birch"].outline() == {"step": 3, "moves": True, "adopts": False}


def test_every_step_moves_to_what_has_been_agreed() -> None:
    group = clusters_of(MIXED)
    for i, cluster in enumerate(group.values()):
        cluster.drift(i)
    outcomes = {}
    for name, cluster in group.items():
        strategy = cluster.every_step
        strategy.settle()
        assert cluster.exchange.digests == [HOST.digest(strategy.brings(bucket)) for bucket in cluster.exchange.buckets]
        brought = np.concatenate([strategy.brings(bucket) for bucket in cluster.exchange.buckets])
        assert brought.tobytes() == cluster.flat().tobytes()
        assert (strategy.turns, strategy.planes()) == (0, [])
        outcomes[name] = strategy.move(np.arange(brought.size, dtype=np.float32), 7, [])
        assert outcomes[name].tobytes() == np.arange(brought.size, dtype=np.float32).tobytes()


def test_an_invitation_that_was_withdrawn() -> None:
    group = clusters_of(HOSTS)
    part(group, "birch")
    assert group["birch"].comeback.due() is None
    assert group["birch"].meets("birch", 3) is None
    assert group["birch"].link.members == ("birch",)


def test_nobody_is_met_once_training_ends() -> None:
    group = clusters_of(HOSTS)
    group["amber"].run.ended = "it is over"
    assert group["amber"].comeback.due("birch") is None
    group["amber"].run.ended = None
    assert group["amber"].comeback.due("birch") == "birch"
    group["amber"].party.returns = None
    assert group["amber"].comeback.due("birch") is None


@pytest.mark.parametrize(
    ("expected", "guest", "patience_s", "timeout_s", "found"),
    [
        ((), None, 30.0, 30.0, None),  # nobody is on the way: it does not wait
        (("birch",), "birch", 30.0, 30.0, "birch"),
        (("birch",), None, 0.3, 30.0, None),  # it does not get any further
        (("birch",), None, 3000.0, 0.3, None),  # steps with an evaluation have made us patient, but only so much
    ],
)
def test_after_the_last_step_who_is_on_the_way_is_waited_for(
    expected: tuple[str, ...], guest: str | None, patience_s: float, timeout_s: float, found: str | None
) -> None:
    cluster = clusters_of((HOST,))["amber"]
    cluster.run.arguments.sync_timeout_s = timeout_s
    summons = cluster.summons
    summons.patience_s = patience_s
    summons.expected = lambda: expected  # type: ignore[attr-defined]
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 2 and guest is not None:
            summons.guests = (guest,)

    cluster.run.local = SimpleNamespace(tick=tick)
    began = time.monotonic()
    assert cluster.comeback.await_last() == found
    assert time.monotonic() - began < 5
    assert (len(ticks) >= 2) == bool(expected)


class Watching(Rounds):
    """As much of `Rounds` as watches for newcomers, of whom ``found`` come one by one."""

    lead = after_step = compare_final = state = restore = None  # type: ignore[assignment]

    def __init__(self, quorum: int, found: Sequence[str | None]) -> None:
        self.exposed = 0
        self.met: list[str] = []
        self._coming = iter(found)
        self._max_steps = 9
        self._arguments = SimpleNamespace(sync_quorum=quorum, sync_timeout_s=3.0)  # type: ignore[assignment]
        self._run = SimpleNamespace(  # type: ignore[assignment]
            alone=True, ended=None, may_meet=True, local=SimpleNamespace(lead=self._lead), exposed=self._exposed
        )
        self.comeback = SimpleNamespace(await_due=self._await_due)  # type: ignore[assignment]

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        self.exposed += 1
        yield
        self.exposed -= 1

    def _lead(self, work: Callable[[], str | None]) -> str | None:
        assert self.exposed == 1, "the wait counts as time lost to the exchange, and once"
        return work()

    def _await_due(self, deadline: Deadline, *, expected: bool) -> str | None:
        assert (deadline.timeout_s, expected) == (3.0, False)
        return next(self._coming)

    def _meet(self, newcomer: str | None, step: int) -> None:
        self.met.append(str(newcomer))
        self._run.alone = newcomer == "gone again"
        self._run.ended = "it is over" if newcomer == "its end" else None
        self._run.alone |= newcomer == "its end"


@pytest.mark.parametrize(
    ("quorum", "found"),
    [(2, ["birch"]), (2, ["gone again", "birch"]), (2, ["its end"])],
)
def test_one_that_is_too_few_by_itself_waits_until_it_is_taken_in(quorum: int, found: list[str]) -> None:
    rounds = Watching(quorum, found)
    rounds._watch(1)
    assert rounds.met == found


def test_one_that_is_too_few_by_itself_does_not_go_on() -> None:
    with pytest.raises(NebulaError, match=r"2 clusters are needed \(sync_quorum\).*within 3 s"):
        Watching(2, ["gone again", None])._watch(1)


def test_nobody_is_waited_for_once_the_others_have_ended_training() -> None:
    rounds = Watching(2, [])
    rounds._run.ended = "cluster 'birch' ended training"
    rounds._watch(1)
    assert rounds.met == []


@pytest.mark.parametrize(
    ("finals", "guests", "found"),
    [
        ((False, False), (2, 2), "birch"),
        ((False, False), (2, 0), None),
        ((True, True), (2, 2), "birch"),  # both end as planned
        ((True, False), (2, 2), None),
    ],
)
def test_nobody_is_taken_in_where_some_end_earlier_than_others(
    finals: tuple[bool, bool], guests: tuple[int, int], found: str | None
) -> None:
    openings = {
        name: Opening(1, 1.0, 0, 0.0, (), final=final, guests=seen)
        for name, final, seen in zip(("amber", "cedar"), finals, guests, strict=True)
    }
    assert common_guest(openings, NAMES) == found


def test_what_is_known_to_be_wrong_is_not_in_a_checkpoint() -> None:
    history = History()
    history.note(1, "a", ["amber", "birch"])
    rounds: Any = SimpleNamespace(exchange=SimpleNamespace(diverged=False), comeback=SimpleNamespace(history=history))
    assert Rounds.remembered(rounds) == history.state()
    rounds.exchange.diverged = True
    assert Rounds.remembered(rounds) is None


def test_a_group_that_ends_as_planned_goes_over_to_nobody() -> None:
    group = clusters_of((HOST,) * 3)
    part(group, "cedar")
    summon(group, "amber")
    assert group["amber"].comeback.due("cedar") == "amber"
    assert group["amber"].comeback.due("cedar", joins=False) == "cedar"


def test_a_newcomer_that_is_gone_at_once() -> None:
    group = clusters_of((HOST,) * 3)
    all_do(group, lambda cluster, i: cluster.trains([1, 2], i, 10.0))
    hosts = part(group, "cedar")
    before = group["amber"].flat().tobytes()
    group["cedar"].link.close()
    outcomes = all_do(hosts, lambda cluster, i: cluster.meets("cedar", 2))
    assert outcomes == {"amber": None, "birch": None}
    all_do(hosts, lambda cluster, i: cluster.local_steps.compare_final(2))
    assert group["amber"].flat().tobytes() == before
    assert [cluster.returned for cluster in hosts.values()] == [[], []]


def test_who_invites_instead_of_accepting_is_left() -> None:
    """Both have invited each other at the same moment."""
    group = clusters_of(HOSTS)
    all_do(group, lambda cluster, i: cluster.trains([1], i, 10.0))
    part(group, "birch")

    def act(cluster: Cluster, i: int) -> Any:
        other = NAMES[1 - i]
        cluster.summons.invite(other, 1)
        cluster.link.post(Kind.INVITE, pack_note({"members": list(NAMES[:2]), "number": 1, "epoch": 5}), to=[other])
        return cluster.meets(other, 1)

    assert all_do(group, act) == {"amber": None, "birch": None}
    assert [cluster.link.members for cluster in group.values()] == [("amber",), ("birch",)]
    assert isinstance(group["amber"].link.losses()["birch"], PeerLost)


def test_moments_of_unlike_names_have_one_order() -> None:
    """The names that Paddle gives to tensors depend on what else was built in a process."""
    group = clusters_of(HOSTS)
    found = []
    for cluster in group.values():
        parameters = cluster.selection.parameters
        kinds = {
            kind: {p.name: np.full(p.shape, index) for index, p in enumerate(parameters)}
            for kind in ("moment2_0", "beta1_pow_acc_0", "moment1_0")
        }
        del kinds["moment1_0"][parameters[1].name]
        optimizer = SimpleNamespace(_accumulators=kinds)
        found.append(optimizer_state(optimizer, parameters).names)
    assert found[0] == found[1]
    assert [name for name in found[0] if name.startswith("moment1")] == [
        f"moment1_0.{index}" for index in range(len(group["amber"].selection)) if index != 1
    ]


def test_a_host_that_is_known_to_be_wrong_takes_nobody_in() -> None:
    invited: list[str] = []
    returns = SimpleNamespace(invite=lambda guest, number: invited.append(guest))
    party = SimpleNamespace(link=SimpleNamespace(peers=()), returns=returns, number=3)
    run: Any = SimpleNamespace(arguments=SimpleNamespace(cluster_name="amber"), party=party)
    member: Any = SimpleNamespace(exchange=SimpleNamespace(diverged=True))
    assert Comeback(run).meet("birch", 5, {}, member, None) is None
    assert invited == []
