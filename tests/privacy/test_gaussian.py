"""The bound, the noise, and both together in the exchange of clusters over loopback."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.privacy.accountant import Accountant
from paddlenlp_nebula.privacy.gaussian import GaussianMechanism, clip_factor, normal
from paddlenlp_nebula.privacy.protection import Protection
from paddlenlp_nebula.strategy.every_step import Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork
from paddlenlp_nebula.strategy.outer import OuterOptimizer

from ..strategy.members import Member, links, together

HALVES = {"amber": np.float32(0.5), "birch": np.float32(0.5)}


def buckets(*sizes: int) -> list[Bucket]:
    return [Bucket(i, 0, size, ((0, 0, size),), None) for i, size in enumerate(sizes)]  # type: ignore[arg-type]


def sent(mechanism: GaussianMechanism, *vectors: np.ndarray) -> np.ndarray:
    """What is sent of an update of several buckets."""
    all_of = buckets(*map(len, vectors))
    protected = mechanism.protect(all_of, lambda bucket: vectors[bucket.index].copy(), HALVES)
    return np.concatenate([protected(bucket) for bucket in all_of])


def norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def has_deviation(noise: np.ndarray, deviation: float) -> bool:
    """Whether normal numbers of mean 0 may have it; True for the right one but for one time in ten million."""
    low, high = chi2.ppf([0.5e-7, 1 - 0.5e-7], len(noise))
    return bool(low < (noise.astype(np.float64) ** 2).sum() / deviation**2 < high)


# The bound


@pytest.mark.parametrize("bound", [1e-6, 0.1, 3.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e9])
def test_the_norm_of_all_buckets_together_is_bounded(bound: float, scale: float) -> None:
    rng = np.random.default_rng(1)
    update = [(scale * rng.standard_normal(size)).astype(np.float32) for size in (1000, 1, 37)]
    whole, clipped = np.concatenate(update), sent(GaussianMechanism(bound), *update)
    if norm(whole) <= bound:
        assert clipped.tobytes() == whole.tobytes()
    else:
        assert norm(clipped) <= bound
        assert norm(clipped) == pytest.approx(bound, rel=1e-6)
        np.testing.assert_allclose(clipped / norm(clipped), whole / norm(whole), atol=1e-6)


def test_an_update_at_the_bound_or_of_nothing_stays() -> None:
    update, mechanism = np.array([3.0, 4.0], np.float32), GaussianMechanism(5.0)
    assert sent(mechanism, update).tobytes() == update.tobytes()
    assert mechanism.norm == 5.0
    assert not sent(GaussianMechanism(5.0), np.zeros(7, np.float32)).any()
    assert clip_factor(5.0, 5.0) == 1
    assert clip_factor(math.inf, 5.0) == 0


# The noise


def test_normal_numbers_are_normal() -> None:
    """Each bound holds but for less than one key in a million."""
    count = 200_001
    numbers = normal(bytes(range(32)), count)
    assert len(numbers) == count
    assert abs(numbers.mean()) < 5 / math.sqrt(count)
    assert abs(numbers.var() - 1) < 5 * math.sqrt(2 / count)
    ordered, grid = np.sort(numbers), np.linspace(-3, 3, 61)
    empirical = np.searchsorted(ordered, grid) / count
    exact = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in grid])
    assert np.abs(empirical - exact).max() < math.sqrt(math.log(2 / 1e-6) / 2 / count)  # Dvoretzky-Kiefer-Wolfowitz
    assert abs(np.corrcoef(numbers[: count // 2], numbers[count // 2 : 2 * (count // 2)])[0, 1]) < 5 / math.sqrt(
        count / 2
    )


def test_equal_keys_give_equal_numbers_and_others_do_not() -> None:
    assert normal(bytes(32), 5).tobytes() == normal(bytes(32), 5).tobytes()
    assert not set(normal(bytes(32), 100)) & set(normal(b"1" + bytes(31), 100))


@pytest.mark.parametrize("clusters", [2, 5])
def test_each_cluster_adds_its_part_of_the_noise(clusters: int) -> None:
    """Multiplier 3 and bound 0.5: a deviation of 1.5 in the sum, 1.5 / sqrt(clusters) here."""
    accountant = Accountant(3.0, clusters, 1e-5)
    count = 100_000
    update = np.full(count, 0.5 / math.sqrt(count) / 2, np.float32)
    noise = sent(GaussianMechanism(0.5, accountant), update[: count // 2], update[count // 2 :]) - update
    assert has_deviation(noise, 1.5 / math.sqrt(clusters))
    assert abs(noise.mean()) < 5.5 * noise.std() / math.sqrt(count)
    assert accountant.rounds == 1


def test_noise_is_fresh_each_time_in_each_bucket_and_on_each_cluster() -> None:
    zeros = np.zeros(50, np.float32)
    numbers = np.concatenate(
        [sent(GaussianMechanism(1.0, Accountant(1.0, 2, 1e-5)), zeros, zeros) for _ in range(2)]
        + [sent(GaussianMechanism(1.0, Accountant(1.0, 2, 1e-5)), zeros)]
    )
    assert len(set(numbers.tolist())) == 250


def test_nothing_to_send_is_not_counted() -> None:
    accountant = Accountant(1.0, 2, 1e-5)
    GaussianMechanism(1.0, accountant).protect([], lambda bucket: pytest.fail("no bucket"), HALVES)
    assert accountant.rounds == 0


# In the exchange


class Private(Member):
    """A member with a bound and noise."""

    def __init__(self, link: Link, bound: float, multiplier: float = 0.0, codec: str = "fp32") -> None:
        clusters = len(link.clusters)
        self.accountant = Accountant(multiplier, clusters, 1e-5) if multiplier else None
        self.gaussian = GaussianMechanism(bound, self.accountant)
        super().__init__(link, codec)

    def prepare(self, codec: str) -> None:
        super().prepare(codec)
        self.exchange = Exchange(
            self.selection, codec_from_spec(codec), self.party, protection=Protection(self.gaussian)
        )


def averaged(
    bound: float, multiplier: float = 0.0, count: int = 2, codec: str = "fp32"
) -> tuple[list[Any], list[Private], Any]:
    """The members' averages of a step, the members, and their gradients."""
    group = [Private(link, bound, multiplier, codec) for link in links(count)]
    gradients = [None] * count

    def act(member: Private, i: int) -> Any:
        member.set_gradients(i, scale=1.0 + i)
        gradients[i] = member.flat_gradient()
        average = EveryStep(member.exchange).average(Contribution(1, 1.0))
        apply_average(member.selection, average.values, average.present)
        return np.array(average.values)

    outcomes = together(group, act)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes, group, gradients


def test_clusters_average_their_bounded_gradients() -> None:
    (a, b), group, gradients = averaged(2.0)
    assert len(group[0].exchange.buckets) > 1
    bounded = [gradient * min(1, 2.0 / norm(gradient)) for gradient in gradients]
    assert all(norm(gradient) > 2.0 for gradient in gradients)
    np.testing.assert_allclose(a, sum(bounded) / 2, rtol=1e-5, atol=1e-7)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_clusters_end_with_identical_parameters_whatever_their_noise(codec: str) -> None:
    (a, b, c), group, _ = averaged(2.0, 1.0, count=3, codec=codec)
    assert a.tobytes() == b.tobytes() == c.tobytes()
    assert {member.accountant.rounds for member in group if member.accountant} == {1}


def test_the_noise_in_the_average_is_what_the_accountant_counts() -> None:
    """Deviation of multiplier * bound / clusters, over many rounds of 24 elements."""
    deviations = []
    for _ in range(12):
        (a, _), _, gradients = averaged(0.5, 4.0)
        bounded = [gradient * min(1, 0.5 / norm(gradient)) for gradient in gradients]
        deviations.append(a - sum(bounded) / 2)
    numbers = np.concatenate(deviations)
    assert has_deviation(numbers, 4.0 * 0.5 / 2)


@pytest.mark.parametrize("fragments", [1, 2])
def test_local_steps_bound_what_a_round_sends(fragments: int) -> None:
    group = [Private(link, 0.25) for link in links(2)]

    def act(member: Private, i: int) -> Any:
        exchange = Exchange(
            member.selection, codec_from_spec("fp32"), member.party, fragments, protection=Protection(member.gaussian)
        )
        strategy = LocalSteps(exchange, OuterOptimizer(), fragments, same_step=True)
        changes = []
        for step in (1, 2, 3):
            before = np.array(strategy.anchor)
            rng = np.random.default_rng(10 * step)  # the same on both: the average is what each has sent
            for parameter in member.selection.parameters:
                parameter.set_value(parameter.numpy() + rng.standard_normal(parameter.shape, dtype=np.float32))
            merge = strategy.merge(LocalWork(step, 1.0, final=step == 3))
            moved = np.array(strategy.anchor) - before
            changes.append((len(merge.parts), np.count_nonzero(moved), norm(moved)))
        return changes, strategy.anchor.tobytes()

    (first, second) = together(group, act)
    assert first == second
    changes, _ = first
    assert [count for _, _, count in changes] == pytest.approx([0.25] * 3, rel=1e-5)
    assert [parts for parts, _, _ in changes] == ([changes[2][0] // fragments] * 2 + [changes[2][0]])
