"""Secure aggregation over loopback: the mean is right, the same everywhere, and nobody is ever seen in the clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.privacy.accountant import Accountant
from paddlenlp_nebula.privacy.fixed_point import FixedPoint, fixed_point_for
from paddlenlp_nebula.privacy.gaussian import GaussianMechanism
from paddlenlp_nebula.privacy.masks import Masks
from paddlenlp_nebula.privacy.protection import Protection
from paddlenlp_nebula.privacy.secure import SecureAggregation
from paddlenlp_nebula.strategy.every_step import Contribution, EveryStep
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork
from paddlenlp_nebula.strategy.outer import OuterOptimizer

from ..link.test_membership import MANNERS, Death, dies_at
from ..strategy.members import Member, links, together
from .test_masks import looks_uniform

CLIP = 100.0  # above any gradient here
FIXED = {"without a bound": fixed_point_for(None), "with a bound": fixed_point_for(CLIP)}


class Hidden(Member):
    """A member whose gradients nobody sees; it keeps what it has sent: (epoch, round, part) -> payload."""

    def __init__(self, link: Link, fixed_point: FixedPoint, noise: float = 0.0, quorum: int = 1) -> None:
        super().__init__(link, on_loss="continue")
        self.party._quorum = quorum
        gaussian = None
        if noise:
            gaussian = GaussianMechanism(CLIP, Accountant(noise, len(link.clusters), 1e-5, hidden=True))
        secure = SecureAggregation(fixed_point, self.selection.names)
        self.exchange = Exchange(
            self.selection, codec_from_spec("fp32"), self.party, protection=Protection(gaussian, secure)
        )
        self.sent: dict[tuple[int, int, int], bytes] = {}
        self.kinds: list[str] = []
        post = link.post

        def noted(kind: Kind, payload: Any = b"", **where: Any) -> None:
            self.kinds.append(kind.name)
            if kind is Kind.BUCKET:
                place = (link.epoch, where["round"], where["part"])
                assert place not in self.sent
                self.sent[place] = bytes(payload)
            post(kind, payload, **where)

        link.post = noted  # type: ignore[method-assign]

    def step(self, number: int, seed: int, weight: float = 1.0) -> np.ndarray:
        self.set_gradients(seed)
        average = EveryStep(self.exchange).average(Contribution(number, weight))
        return np.array(average.values)


def gradients(seeds: list[int], like: Hidden) -> list[np.ndarray]:
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        sizes = [parameter.size for parameter in like.selection.parameters]
        found.append(np.concatenate([rng.standard_normal(size, dtype=np.float32) for size in sizes]))
    return found


def ran(group: list[Hidden], act: Callable[[Any, int], Any]) -> list[Any]:
    outcomes = together(group, act)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@pytest.mark.parametrize("fixed_point", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (5.0, 2.0, 1.0)])
def test_three_members_get_the_same_mean_to_the_step(fixed_point: FixedPoint, weights: tuple[float, ...]) -> None:
    group = [Hidden(link, fixed_point) for link in links(3)]
    assert len(group[0].exchange.buckets) > 1
    steps = ran(group, lambda member, i: [member.step(n, 10 * n + i, weights[i]) for n in (1, 2, 3)])
    for n in (1, 2, 3):
        exact = sum(
            float(np.float32(weight / sum(weights))) * gradient.astype(np.float64)
            for weight, gradient in zip(weights, gradients([10 * n, 10 * n + 1, 10 * n + 2], group[0]), strict=True)
        )
        a, b, c = (results[n - 1] for results in steps)
        assert a.tobytes() == b.tobytes() == c.tobytes()
        assert (np.abs(a - exact) <= 1.5 * fixed_point.step + np.abs(exact) * 2**-24).all()
    assert [member.kinds.count("NOTE") for member in group] == [1, 1, 1]  # keys, once


@pytest.mark.parametrize("fixed_point", FIXED.values(), ids=FIXED)
def test_what_is_sent_looks_random_and_is_never_the_same(fixed_point: FixedPoint) -> None:
    group = [Hidden(link, fixed_point) for link in links(3)]
    # The same gradient in each round: only masks can make a difference.
    ran(group, lambda member, i: [member.step(n, i) for n in range(1, 101)])
    for member in group:
        assert len(set(member.sent.values())) == len(member.sent) == 100 * len(member.exchange.buckets)
        payloads = np.frombuffer(b"".join(member.sent.values()), np.uint8)
        assert len(payloads) == 100 * 24 * fixed_point.bits // 8
        assert looks_uniform(payloads)
    for one, other in [(0, 1), (1, 2), (0, 2)]:  # any two put together what they have sent
        a, b = (np.frombuffer(b"".join(group[i].sent.values()), fixed_point.dtype) for i in (one, other))
        assert looks_uniform(a + b)
        assert looks_uniform(a - b)


def test_local_steps_hide_their_changes_and_merge_alike() -> None:
    group = [Hidden(link, FIXED["without a bound"]) for link in links(3)]

    def act(member: Hidden, i: int) -> Any:
        strategy = LocalSteps(member.exchange, OuterOptimizer("nesterov", 0.7, 0.9), same_step=True)
        start = np.array(strategy.anchor)
        rng = np.random.default_rng(i)
        for parameter in member.selection.parameters:
            parameter.set_value(parameter.numpy() + rng.standard_normal(parameter.shape, dtype=np.float32))
        drift = member.flat() - start
        merge = strategy.merge(LocalWork(1, 1.0 + i))
        return start, drift, merge.shares[member.link.cluster], np.array(strategy.anchor)

    outcomes = ran(group, act)
    start = outcomes[0][0].astype(np.float64)
    mean = sum(float(share) * drift for _, drift, share, _ in outcomes)
    np.testing.assert_allclose(outcomes[0][3], start + 0.7 * 1.9 * mean, rtol=1e-5, atol=1e-6)
    assert len({anchor.tobytes() for *_, anchor in outcomes}) == 1


def test_noise_and_masks_together_leave_equal_means_that_are_counted() -> None:
    group = [Hidden(link, fixed_point_for(CLIP, CLIP / 3**0.5), noise=1.0) for link in links(3)]
    a, b, c = ran(group, lambda member, i: member.step(1, i))
    assert a.tobytes() == b.tobytes() == c.tobytes()
    exact = sum(gradients([0, 1, 2], group[0])) / 3
    assert 0.3 * CLIP / 3 < (a - exact).std() < 3 * CLIP / 3


def test_two_members_are_refused() -> None:
    group = [Hidden(link, FIXED["without a bound"]) for link in links(2)]
    for outcome in together(group, lambda member, i: member.step(1, i)):
        assert isinstance(outcome, NebulaError)
        assert "needs 3 clusters and more, of which amber and birch are left" in str(outcome)
    assert not any(member.sent for member in group)


@pytest.mark.parametrize("fixed_point", FIXED.values(), ids=FIXED)
def test_a_number_that_does_not_fit_is_named(fixed_point: FixedPoint) -> None:
    group = [Hidden(link, fixed_point) for link in links(3)]

    def act(member: Hidden, i: int) -> None:
        member.set_gradients(i)
        if i == 1:
            gradient = member.selection.parameters[-1].grad
            values = gradient.numpy()
            values[-1] = 1e9
            gradient.set_value(values)
        EveryStep(member.exchange).average(Contribution(1, 1.0))

    name = group[1].selection.names[-1]
    outcome = together(group[:], lambda member, i: _and_leave(act, member, i))[1]
    assert isinstance(outcome, NebulaError)
    assert str(outcome).startswith(f"an update must be at most {fixed_point.limit:g}")
    assert f"got 1e+09 in {name!r} in round 1: lower the learning rate" in str(outcome)


def _and_leave(act: Callable[[Hidden, int], None], member: Hidden, i: int) -> None:
    try:
        act(member, i)
    finally:
        member.link.leave("it failed", deliberate=False, linger_s=0.05)


@pytest.mark.parametrize("manner", ["killed", "failed"])
@pytest.mark.parametrize("action", range(1, 75, 3))
def test_four_lose_one_at_any_stage_and_three_repeat_the_round(action: int, manner: str) -> None:
    group = [Hidden(link, FIXED["without a bound"], quorum=3) for link in links(4)]
    dies_at(group[1].link, action, MANNERS[manner])
    outcomes = together(group, lambda member, i: [member.step(n, 10 * n + i) for n in (1, 2)])
    died = isinstance(outcomes.pop(1), Death)
    left = [member for member in group if member.link.cluster != "birch"]
    for n in (1, 2):
        with_it = sum(gradients([10 * n + i for i in range(4)], group[0])) / 4
        without = sum(gradients([10 * n + i for i in (0, 2, 3)], group[0])) / 3
        results = [outcome[n - 1] for outcome in outcomes]
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
        assert any(np.abs(results[0] - exact).max() < 1e-5 for exact in (with_it, without))
    if died:
        assert all(member.link.members == ("amber", "cedar", "delta") for member in left)
    for member in left:  # attempts of one round have masks of their own
        assert len(set(member.sent.values())) == len(member.sent)


def test_three_that_lose_one_stop() -> None:
    group = [Hidden(link, FIXED["without a bound"], quorum=3) for link in links(3)]

    def act(member: Hidden, i: int) -> Any:
        first = member.step(1, i)
        if i == 2:
            member.link.close()
            return first
        return member.step(2, i)

    outcomes = together(group, act)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, NebulaError)
        assert "3 clusters are needed to go on (sync_quorum)" in str(outcome)
    assert all({number for _, number, _ in member.sent} <= {1, 2} for member in group)
    assert all(epoch == 0 for member in group for epoch, _, _ in member.sent)


def test_three_stop_whatever_the_quorum() -> None:
    group = [Hidden(link, FIXED["without a bound"], quorum=1) for link in links(3)]

    def act(member: Hidden, i: int) -> Any:
        if i == 2:
            return member.link.leave("it has had enough", deliberate=True, linger_s=0.05)
        return member.step(1, i)

    outcomes = together(group, act)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, NebulaError)
        assert "privacy_secure_aggregation needs 3 clusters and more" in str(outcome)
    assert not any(epoch for member in group for epoch, _, _ in member.sent)


def test_a_member_that_comes_back_brings_no_masks_of_another_list() -> None:
    """Four that were together, of whom one was in another group meanwhile, whose epoch has the same number."""
    group = [Hidden(link, FIXED["without a bound"]) for link in links(4)]
    secure = group[3].exchange._protection.secure
    assert secure is not None
    keys = {name: X25519PrivateKey.generate() for name in ("delta", "x", "y")}
    secure._masks = Masks("delta", {n: k.public_key().public_bytes_raw() for n, k in keys.items()}, keys["delta"], 0)
    results = ran(group, lambda member, i: member.step(1, i))
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], sum(gradients([0, 1, 2, 3], group[0])) / 4, rtol=1e-5, atol=1e-6)


def test_a_payload_of_another_length_costs_membership() -> None:
    group = [Hidden(link, FIXED["without a bound"], quorum=3) for link in links(4)]
    group[3].exchange._protection = Protection(None, SecureAggregation(FIXED["with a bound"], ["x"] * 9))
    outcomes = together(group, lambda member, i: member.step(1, i))
    exact = sum(gradients([0, 1, 2], group[0])) / 3
    for outcome in outcomes[:3]:
        np.testing.assert_allclose(outcome, exact, rtol=1e-5, atol=1e-6)
    assert isinstance(outcomes[3], NebulaError)
