"""local_steps: members in threads, drifting apart and merging, against plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, Merge, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.tensors import write

from ..link.clusters import NAMES
from .members import Member, links, together

AVERAGE = OuterOptimizer("average")
NESTEROV = OuterOptimizer("nesterov", 0.7, 0.9)


class Drifter(Member):
    """A member that changes its parameters by itself, the same way each time, and merges."""

    def __init__(
        self, link: Any, outer: OuterOptimizer = AVERAGE, fragments: int = 1, codec: str = "fp32", **more: Any
    ):
        self.outer, self.fragments = outer, fragments
        self.same_step = more.pop("same_step", True)
        super().__init__(link, codec, **more)

    def prepare(self, codec: str) -> None:
        super().prepare(codec)
        if self.fragments > 1:
            self.exchange = Exchange(self.selection, self.exchange._codec, self.party, self.fragments)
        self.strategy = LocalSteps(self.exchange, self.outer, self.fragments, same_step=self.same_step)

    def drift(self, seed: int) -> None:
        """Some local steps."""
        rng = np.random.default_rng(seed)
        for parameter in self.selection.parameters:
            write(parameter, parameter.numpy().ravel() + rng.standard_normal(parameter.size, dtype=np.float32))

    def merge(self, **work: Any) -> Merge:
        """A round, applied."""
        merge = self.strategy.merge(LocalWork(**{"step": 1, "weight": 1.0, **work}))
        parameters = self.selection.parameters
        apply_merge(
            self.selection,
            self.exchange.buckets,
            merge.parts,
            merge.values,
            lambda index, values: write(parameters[index], values),
        )
        return merge


def drifters(count: int, *args: Any, **more: Any) -> list[Drifter]:
    return [Drifter(link, *args, **more) for link in links(count)]


def rounds(group: list[Drifter], first: int, last: int, weights: tuple[float, ...]) -> None:
    """Rounds first..last, each after a drift that depends on the round and the member."""

    def act(member: Drifter, i: int) -> None:
        for number in range(first, last + 1):
            member.drift(100 * number + i)
            member.merge(step=number, weight=weights[i])

    assert together(group, act) == [None] * len(group)


def by_numpy(start: Any, rounds: int, weights: tuple[float, ...], outer: OuterOptimizer, sizes: list[int]) -> Any:
    """The same in float64."""
    anchor, velocity = start.astype(np.float64), np.zeros(len(start))
    for number in range(1, rounds + 1):
        change = np.zeros(len(start))
        for i, weight in enumerate(weights):
            rng = np.random.default_rng(100 * number + i)
            own = np.concatenate([rng.standard_normal(size, dtype=np.float32) for size in sizes])
            change += weight / sum(weights) * own
        if outer.name == "nesterov":
            velocity = outer.momentum * velocity + change
            change = change + outer.momentum * velocity
        anchor = anchor + outer.lr * change
    return anchor


@pytest.mark.parametrize("outer", [AVERAGE, OuterOptimizer("sgd", 0.5), NESTEROV], ids=lambda outer: outer.name)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (16.0, 8.0, 4.0), (0.0, 2.0)])
def test_merges_against_numpy(outer: OuterOptimizer, weights: tuple[float, ...]) -> None:
    group = drifters(len(weights), outer)
    sizes = [parameter.size for parameter in group[0].selection.parameters]
    wanted = by_numpy(group[0].flat(), 4, weights, outer, sizes)
    rounds(group, 1, 4, weights)
    for member in group:
        assert member.flat().tobytes() == group[0].flat().tobytes()
        assert member.strategy.anchor.tobytes() == member.flat().tobytes()
        np.testing.assert_allclose(member.flat(), wanted, rtol=1e-5, atol=1e-5)
        assert member.exchange.parameter_digest() == group[0].exchange.parameter_digest()


def test_the_share_follows_the_weight() -> None:
    group = drifters(2)
    merges = together(
        group, lambda member, i: member.merge(weight=[3.0, 1.0][i], batch_hash=i + 1, step_s=0.1 * (i + 1))
    )
    assert [merge.shares for merge in merges] == [{"amber": 0.75, "birch": 0.25}] * 2
    assert merges[0].batch_hashes == {"amber": 1, "birch": 2}
    assert [merge.fastest_step_s for merge in merges] == [0.1, 0.1]


@pytest.mark.parametrize("outer", [AVERAGE, NESTEROV], ids=lambda outer: outer.name)
@pytest.mark.parametrize("fragments", [1, 2])
def test_restored_goes_on_as_if_never_stopped(outer: OuterOptimizer, fragments: int) -> None:
    """Between two rounds, each member with parameters of its own."""
    whole, first = drifters(2, outer, fragments), drifters(2, outer, fragments)
    rounds(whole, 1, 6, (3.0, 1.0))
    rounds(first, 1, 3, (3.0, 1.0))
    second = drifters(2, outer, fragments)
    for i, (old, new) in enumerate(zip(first, second, strict=True)):
        old.drift(100 * 4 + i)
        saved = {name: array.copy() for name, array in old.strategy.state().items()}
        for mine, theirs in zip(new.selection.parameters, old.selection.parameters, strict=True):
            mine.set_value(theirs)
        new.party.number = 3
        new.strategy.restore(saved)

    def go_on(member: Drifter, i: int) -> None:
        member.merge(step=4, weight=(3.0, 1.0)[i])

    assert together(second, go_on) == [None] * 2
    rounds(second, 5, 6, (3.0, 1.0))
    for one, other in zip(whole, second, strict=True):
        assert one.flat().tobytes() == other.flat().tobytes()
        assert {k: v.tobytes() for k, v in one.strategy.state().items()} == {
            k: v.tobytes() for k, v in other.strategy.state().items()
        }


def test_a_state_of_other_settings_is_refused() -> None:
    with_momentum, without = drifters(1, NESTEROV)[0], drifters(1)[0]
    with pytest.raises(NebulaError, match=r"state of sync_strategy='local_steps' must hold .*velocity"):
        with_momentum.strategy.restore(without.strategy.state())
    with pytest.raises(
        NebulaError, match=r"sync_codec='fp32' must hold codec/0/residual as nothing, got float32 \[3\]"
    ):
        without.strategy.restore({**without.strategy.state(), "codec/0/residual": np.zeros(3, dtype=np.float32)})


def test_the_state_of_another_cluster_is_refused() -> None:
    one, other = drifters(2)
    with pytest.raises(
        NebulaError, match=r"'\w+' must resume from a checkpoint of its own, got what cluster '\w+' had"
    ):
        one.strategy.restore(other.strategy.state())
    one.strategy.restore(one.strategy.state())


# Fragments


def test_fragments_take_turns_and_the_last_round_merges_all() -> None:
    group = drifters(2, AVERAGE, 2)
    assert [bucket.numel for bucket in group[0].exchange.buckets] == [16, 8]  # whole parameters
    start = group[0].flat()

    def act(member: Drifter, i: int) -> list[Any]:
        found = []
        for number in range(1, 5):
            member.drift(10 * number + i)
            merge = member.merge(step=number, final=number == 4)
            found.append((merge.parts, member.flat()))
        return found

    ours, theirs = together(group, act)
    assert [parts for parts, _ in ours] == [(0,), (1,), (0,), (0, 1)]
    equal = [[(a[:16] == b[:16]).all(), (a[16:] == b[16:]).all()] for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    assert equal == [[True, False], [False, True], [True, False], [True, True]]
    drifts = [np.mean([_drift(10 * number + i) for i in range(2)], axis=0) for number in range(1, 5)]
    np.testing.assert_allclose(ours[-1][1], start + np.sum(drifts, axis=0), rtol=1e-5, atol=1e-5)


def test_more_fragments_than_parts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sync_fragments must be at most 3, .* 3 parameters .* got 9"):
        drifters(1, AVERAGE, 9)


def _drift(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.standard_normal(size, dtype=np.float32) for size in (16, 4, 4)])


def test_each_fragment_is_weighted_by_what_was_done_since_its_own_last_round() -> None:
    group = drifters(2, AVERAGE, 2)
    weights = ((1.0, 1.0), (3.0, 1.0), (5.0, 1.0))
    shares = together(
        group,
        lambda member, i: [float(member.merge(step=s, weight=weights[s - 1][i]).shares["amber"]) for s in (1, 2, 3)],
    )
    assert shares[0] == pytest.approx([1 / 2, 4 / 6, 8 / 10])


# The end, and faults


@pytest.mark.parametrize("enders", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_who_takes_no_further_step_ends_the_training_of_all(enders: tuple[int, ...]) -> None:
    """The last round merges what all have done, whatever step they are at."""
    group = drifters(3)

    def act(member: Drifter, i: int) -> Any:
        member.drift(i)
        merge = member.merge(step=10 + i, final=i in enders)
        member.strategy.compare_final(10 + i)
        return merge.ended_by, merge.split

    outcomes = together(group, act)
    split = len(enders) < 3
    assert outcomes == [(() if i in enders else tuple(NAMES[e] for e in enders), split) for i in range(3)]
    assert len({member.flat().tobytes() for member in group}) == 1


def test_different_steps_are_refused_unless_balanced() -> None:
    for outcome in together(drifters(2), lambda member, i: member.merge(step=5 + i)):
        assert isinstance(outcome, NebulaError)
        assert "must be at the same step in round 1" in str(outcome)
    outcomes = together(drifters(2, same_step=False), lambda member, i: member.merge(step=5 + i))
    assert all(isinstance(outcome, Merge) for outcome in outcomes)


def test_anchors_that_differ_are_found() -> None:
    group = drifters(2)
    group[1].strategy.anchor[9] += 1e-3
    group[1].strategy._hash_anchors()
    for outcome in together(group, lambda member, i: member.merge()):
        assert "must hold identical parameters after round 0, but bucket 1 of 4 differs" in str(outcome)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_change_that_is_not_finite_names_its_parameter(value: float) -> None:
    (member,) = drifters(1, on_loss="continue")
    broken = member.selection.parameters[2].numpy()
    broken[1] = value
    member.selection.parameters[2].set_value(broken)
    member.merge()  # alone nothing travels: it is the Trainer's own affair
    group = drifters(2)
    group[0].selection.parameters[2].set_value(broken)

    def act(member: Drifter, i: int) -> Any:
        try:
            return member.merge(step=7)
        except NebulaError as error:
            member.link.leave(str(error), deliberate=False, linger_s=0.1)
            return str(error)

    faulty, _ = together(group, act)
    assert "the change of 'second.bias' must be finite, got 1 infinite or NaN of " in faulty
    assert "after step 7" in faulty


def test_alone_the_parameters_stay_as_they_are() -> None:
    (member,) = drifters(1, NESTEROV)
    member.drift(0)
    before = member.flat()
    merge = member.merge()
    assert (merge.parts, len(merge.values), merge.shares) == ((), 0, {"amber": 1.0})
    assert member.flat().tobytes() == before.tobytes()
    assert member.strategy.anchor.tobytes() == before.tobytes()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_of_three_is_lost_in_a_round(victim: int) -> None:
    group = drifters(3, on_loss="continue")

    def act(member: Drifter, i: int) -> Any:
        member.drift(i)
        if i == victim:
            member.link.leave("it failed", deliberate=False, linger_s=0.1)
            return None
        member.merge(step=1)
        member.drift(10 + i)
        member.merge(step=2)
        return member.flat()

    start = group[0].flat()
    left = [i for i in range(3) if i != victim]
    outcomes = [outcome for outcome in together(group, act) if outcome is not None]
    assert outcomes[0].tobytes() == outcomes[1].tobytes()
    wanted = start + np.mean([_drift(i) for i in left], axis=0) + np.mean([_drift(10 + i) for i in left], axis=0)
    np.testing.assert_allclose(outcomes[0], wanted, rtol=1e-5, atol=1e-5)


# Lossy codecs


def lossy(count: int, spec: str = "topk:1/4,2bit", decay: float = 1.0, **settings: Any) -> list[Drifter]:
    """Members whose codec loses much, with error feedback."""
    group = []
    for link in links(count):
        member = Drifter(link, **{"on_loss": "stop"} | {k: v for k, v in settings.items() if k == "on_loss"})
        codec = ErrorFeedback(codec_from_spec(spec), decay)
        member.exchange = Exchange(member.selection, codec, member.party)
        member.strategy = LocalSteps(
            member.exchange,
            AVERAGE,
            1,
            same_step=True,
            final_codec=codec_from_spec("fp32"),
            keep_unsent=settings.get("keep_unsent", False),
        )
        group.append(member)
    return group


def unsent(member: Drifter) -> Any:
    parts = [member.exchange.unsent(part) for part in range(len(member.exchange.buckets))]
    return np.concatenate(parts)


@pytest.mark.parametrize("keep_unsent", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_the_last_round_sends_what_was_not_sent(count: int, keep_unsent: bool) -> None:
    """All drifts are in the final parameters, as if every round had been exact."""
    group = lossy(count, keep_unsent=keep_unsent)
    start = group[0].flat()

    def act(member: Drifter, i: int) -> Any:
        seen = []
        for number in range(1, 5):
            member.drift(10 * number + i)
            member.merge(step=number, final=number == 4)
            seen.append((member.flat(), member.strategy.anchor.copy(), unsent(member).copy()))
        member.strategy.compare_final(4)
        return seen

    histories = together(group, act)
    for number in range(3):
        anchors = [history[number][1] for history in histories]
        assert len({anchor.tobytes() for anchor in anchors}) == 1
        for history in histories:
            flat, anchor, left = history[number]
            assert np.abs(left).max() > 0.1
            np.testing.assert_array_equal(flat, anchor + left if keep_unsent else anchor)
    drifts = [np.mean([_drift(10 * number + i) for i in range(count)], axis=0) for number in range(1, 5)]
    for history in histories:
        flat, anchor, left = history[3]
        assert flat.tobytes() == anchor.tobytes() == histories[0][3][0].tobytes()
        assert not left.any()
        np.testing.assert_allclose(flat, start + np.sum(drifts, axis=0), rtol=1e-4, atol=1e-4)


def test_a_round_begun_as_any_other_and_repeated_as_the_last_sends_everything_once() -> None:
    (member,) = lossy(1)
    change = _drift(1)
    offsets = [(b.start, b.stop) for b in member.exchange.buckets]

    def produce(bucket: Any) -> Any:
        return change[bucket.start : bucket.stop].copy()

    parts = range(len(offsets))
    share = {"amber": np.float32(1)}
    first = member.exchange.average(1, share, parts, produce)
    again = member.exchange.average(1, share, parts, produce)
    assert first.tobytes() == again.tobytes()  # encoded once
    assert np.abs(first - change).max() > 0.1
    for _ in range(2):
        final = member.exchange.average(1, share, parts, produce, final=codec_from_spec("fp32"))
        np.testing.assert_allclose(final, change, rtol=1e-5, atol=1e-6)
    member.exchange.commit()


def test_what_was_sent_for_nothing_is_sent_again() -> None:
    (member,) = lossy(1)
    change = _drift(1)
    parts = range(len(member.exchange.buckets))
    member.exchange.average(1, {"amber": np.float32(1)}, parts, lambda b: change[b.start : b.stop].copy())
    member.exchange.commit(void=True)
    np.testing.assert_allclose(unsent(member), change, rtol=1e-5, atol=1e-6)
