"""every_step: members in threads, averaging gradients of small Paddle models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.strategy.every_step import Average, Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.opening import _HEAD
from paddlenlp_nebula.tensors import gradient, set_gradient

from ..link.clusters import NAMES
from ..models import Tied, fill
from .conftest import BUCKET_NUMEL
from .members import Member, links, together

PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}


class Averager(Member):
    """A member that averages gradients."""

    def prepare(self, codec: str) -> None:
        super().prepare(codec)
        self.strategy = EveryStep(self.exchange)

    def exchanged(self, **contribution: Any) -> Average:
        """A round, applied."""
        average = self.strategy.average(Contribution(**{"step": 1, "weight": 1.0, **contribution}))
        scale = contribution.get("loss_scale", 1.0)
        apply_average(self.selection, average.values, average.present, skip=bool(average.non_finite), loss_scale=scale)
        return average


def members(count: int, codec: str = "fp32", **more: Any) -> list[Averager]:
    found = [Averager(link, codec, **more) for link in links(count)]
    for seed, member in enumerate(found):
        member.set_gradients(seed)
    return found


def all_averaged(group: Sequence[Averager], act: Callable[[Averager, int], Average]) -> list[Average]:
    outcomes = together(group, act)
    assert all(isinstance(outcome, Average) for outcome in outcomes), outcomes
    for average in outcomes[1:]:
        assert average.values.tobytes() == outcomes[0].values.tobytes()
        assert (average.present, average.non_finite) == (outcomes[0].present, outcomes[0].non_finite)
        assert average.batch_hashes == outcomes[0].batch_hashes
    return outcomes


# The average


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0, 5), (16, 8, 4), (1, 0, 2), (1e-3, 1e3), (7, 7, 7, 1)])
def test_weighted_averages(codec: str, weights: tuple[float, ...]) -> None:
    group = members(len(weights), codec)
    own = [member.flat_gradient() for member in group]
    wanted = np.average(own, axis=0, weights=weights)
    averages = all_averaged(group, lambda member, i: member.exchanged(weight=float(weights[i]), batch_hash=i + 1))
    tolerance = {"fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7}[codec]
    np.testing.assert_allclose(averages[0].values, wanted, rtol=tolerance, atol=tolerance)
    for average, weight in zip(averages, weights, strict=True):
        assert average.share == pytest.approx(weight / sum(weights), rel=1e-6)
    assert averages[0].batch_hashes == {name: i + 1 for i, name in enumerate(NAMES[: len(weights)])}
    for member in group:
        np.testing.assert_array_equal(member.flat_gradient(), averages[0].values)
        assert member.party.number == 1


def test_fp32_is_the_sum_in_the_configured_order() -> None:
    group = members(3)
    own = [member.flat_gradient() for member in group]
    share = np.float32(1 / 3)
    wanted = own[0] * share + own[1] * share + own[2] * share
    averages = all_averaged(group, lambda member, i: member.exchanged())
    np.testing.assert_array_equal(averages[0].values, wanted)


def test_clusters_with_one_parameter_set_take_the_step_of_one_job() -> None:
    """Three clusters, ten AdamW steps with accumulation's uneven weights, against the concatenated batch."""
    rng = np.random.default_rng(0)
    sizes = (2, 3, 5)
    batches = [[rng.standard_normal((size, 4), dtype=np.float32) for size in sizes] for _ in range(10)]

    def step(model: Any, optimizer: Any, batch: Any, average: Callable[[], Any] = lambda: None) -> None:
        (model(paddle.to_tensor(batch)) ** 2).mean().backward()
        average()
        optimizer.step()
        optimizer.clear_grad()

    def optimizer_for(model: Any) -> Any:
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1, grad_clip=clip)

    alone = Tied()
    optimizer = optimizer_for(alone)
    for batch in batches:
        step(alone, optimizer, np.concatenate(batch))

    def train(member: Averager, index: int) -> None:
        optimizer = optimizer_for(member.model)
        for number, batch in enumerate(batches, start=1):
            exchange = functools.partial(member.exchanged, step=number, weight=float(sizes[index]))
            step(member.model, optimizer, batch[index], exchange)
            member.exchange.refresh_digests()
        member.strategy.compare_final()

    group = members(3)
    for member in group:
        for parameter in member.selection.parameters:
            set_gradient(parameter, None)
    assert together(group, train) == [None] * 3
    for name, parameter in alone.named_parameters():
        values = [dict(member.model.named_parameters())[name].numpy() for member in group]
        assert values[0].tobytes() == values[1].tobytes() == values[2].tobytes()
        np.testing.assert_allclose(values[0], parameter.numpy(), atol=1e-5)


# Which gradients


def test_a_gradient_that_only_one_has() -> None:
    group = members(2)
    own = [member.flat_gradient() for member in group]
    for parameter in group[1].selection.parameters[1:]:
        set_gradient(parameter, None)
    averages = all_averaged(group, lambda member, i: member.exchanged())
    np.testing.assert_allclose(averages[0].values[:16], (own[0] + own[1])[:16] / 2, rtol=1e-6)
    np.testing.assert_array_equal(averages[0].values[16:], own[0][16:] / 2)
    assert averages[0].present == [True] * 3
    assert gradient(group[1].selection.parameters[2]) is not None


def test_a_gradient_that_nobody_has_stays_none() -> None:
    group = members(3)
    for member in group:
        set_gradient(member.selection.parameters[1], None)
    averages = all_averaged(group, lambda member, i: member.exchanged())
    assert averages[0].present == [True, False, True]
    for member in group:
        assert gradient(member.selection.parameters[1]) is None


def test_gradients_that_are_all_zero() -> None:
    group = members(2)
    for member in group:
        member.set_gradients(0, scale=0.0)
    averages = all_averaged(group, lambda member, i: member.exchanged())
    np.testing.assert_array_equal(averages[0].values, np.zeros(24))
    assert gradient(group[0].selection.parameters[0]) is not None


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16"])
def test_only_what_is_selected_travels_and_once(codec: str) -> None:
    """24 elements: the tied weight once, the frozen layer not at all."""
    group = members(3, codec)
    all_averaged(group, lambda member, i: member.exchanged())
    for member in group:
        sent = member.link.bytes_sent
        assert sent["BUCKET"] == 2 * (4 * HEADER_BYTES + 24 * PER_ELEMENT[codec])
        assert sent["ROUND"] == 2 * (HEADER_BYTES + 40 + 4 * 8 + 1)
        assert sent["END"] == sent["VOTE"] == 2 * HEADER_BYTES
        assert set(sent) - {"WAITING"} == {"BUCKET", "ROUND", "END", "VOTE"}


def test_half_precision_parameters_are_reduced_in_float32() -> None:
    group = members(2)
    for member in group:
        member.model.to(dtype="bfloat16")
        member.prepare("fp32")
    group[0].set_gradients(0)
    group[1].set_gradients(1)
    own = [
        np.concatenate([gradient(p).astype("float32").numpy().ravel() for p in m.selection.parameters]) for m in group
    ]
    averages = all_averaged(group, lambda member, i: member.exchanged())
    np.testing.assert_array_equal(averages[0].values, own[0] * np.float32(0.5) + own[1] * np.float32(0.5))
    assert str(gradient(group[0].selection.parameters[0]).dtype).endswith("bfloat16")


def test_alone_an_average_is_what_one_has() -> None:
    (member,) = members(1)
    own = member.flat_gradient()
    (average,) = all_averaged([member], lambda member, i: member.exchanged(weight=8.0))
    np.testing.assert_array_equal(average.values, own)
    assert (average.share, member.link.bytes_sent) == (1.0, {})


# What is not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("index", "name"), [(0, "first.weight"), (1, "first.bias"), (2, "second.bias")])
def test_a_fault_names_the_parameter(value: float, index: int, name: str) -> None:
    group = members(2, on_loss="continue")
    broken = group[1].flat_gradient()[group[1].selection.offsets[index] : group[1].selection.offsets[index + 1]]
    broken[-1] = value
    set_gradient(group[1].selection.parameters[index], broken)

    def act(member: Averager, i: int) -> Any:
        try:
            return member.exchanged(step=7)
        except NebulaError as error:
            member.link.leave(str(error), deliberate=False, linger_s=0.1)
            return str(error)

    healthy, faulty = together(group, act)
    assert f"the gradient of '{name}' must be finite, got 1 infinite or NaN of " in faulty
    assert "at step 7" in faulty
    assert isinstance(healthy, Average)  # it goes on alone
    assert list(healthy.batch_hashes) == ["amber"]
    assert group[0].link.losses()["birch"].reason == faulty


def test_infinite_and_minus_infinite_do_not_cancel_out() -> None:
    (member,) = members(1)
    set_gradient(member.selection.parameters[1], np.array([math.inf, -math.inf, 0, 0], dtype=np.float32))
    with pytest.raises(NebulaError, match=r"'first\.bias' must be finite, got 2 infinite or NaN of 4"):
        member.exchanged()


@pytest.mark.parametrize("culprits", [(0,), (1,), (0, 2)])
def test_with_a_scaler_all_skip_the_step_together(culprits: tuple[int, ...]) -> None:
    group = members(3)
    for culprit in culprits:
        set_gradient(group[culprit].selection.parameters[2], np.array([1, math.inf, 2, 3], dtype=np.float32))
    averages = all_averaged(group, lambda member, i: member.exchanged(loss_scale=2.0 ** (10 + i), scaled=True))
    assert averages[0].non_finite == tuple(NAMES[culprit] for culprit in culprits)
    for member in group:
        for parameter in member.selection.parameters:
            assert np.isinf(gradient(parameter).numpy()).all()


@pytest.mark.parametrize("scales", [(1024.0, 1024.0), (65536.0, 32768.0), (1.0, 4096.0, 3.0)])
def test_different_loss_scales_give_the_same_true_gradient(scales: tuple[float, ...]) -> None:
    group = members(len(scales))
    own = [member.flat_gradient() for member in group]
    for seed, (member, scale) in enumerate(zip(group, scales, strict=True)):
        member.set_gradients(seed, scale)
    averages = all_averaged(group, lambda member, i: member.exchanged(loss_scale=scales[i], scaled=True))
    np.testing.assert_allclose(averages[0].values, np.mean(own, axis=0), rtol=1e-5, atol=1e-6)
    for member, scale in zip(group, scales, strict=True):
        np.testing.assert_allclose(member.flat_gradient(), scale * averages[0].values, rtol=1e-6)


@pytest.mark.parametrize(("codec", "largest"), [("fp16", 1e5), ("bf16", 3.4e38)])
def test_what_does_not_fit_on_the_wire_is_an_error_that_says_where(codec: str, largest: float) -> None:
    (member,) = members(1, codec)
    set_gradient(member.selection.parameters[2], np.array([0, 0, 0, largest], dtype=np.float32))
    with pytest.raises(
        NebulaError, match=f"does not fit into sync_codec='{codec}' in round 1 .*second.bias.*: its largest"
    ):
        member.exchanged()


# What the members must agree on


def refusals(group: Sequence[Averager], act: Callable[[Averager, int], Any]) -> list[str]:
    outcomes = together(group, act)
    assert all(type(outcome) is NebulaError for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize("position", [0, 8, 23])
def test_different_parameters_are_found_and_the_bucket_named(position: int) -> None:
    group = members(3)
    selection = group[2].selection
    index = next(i for i in range(3) if position < selection.offsets[i + 1])
    parameter = selection.parameters[index]
    flat = parameter.numpy().ravel()
    flat[position - selection.offsets[index]] *= 1 + 1e-6
    parameter.set_value(flat.reshape(parameter.shape))
    group[2].exchange.refresh_digests()
    for sentence in refusals(group, lambda member, i: member.exchanged()):
        assert "must hold identical parameters before round 1" in sentence
        assert f"bucket {position // BUCKET_NUMEL} of 4 differs" in sentence
        assert selection.names[index] in sentence
        assert "'cedar'" in sentence


def test_the_final_comparison() -> None:
    group = members(2)
    assert together(group, lambda member, i: member.strategy.compare_final()) == [None, None]
    fill(group[1].model, 5)
    group[1].exchange.refresh_digests()
    for sentence in refusals(group, lambda member, i: member.strategy.compare_final()):
        assert "must hold identical parameters at the end, but bucket 0 of 4 differs" in sentence


@pytest.mark.parametrize("enders", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_who_has_taken_its_last_step_ends_the_training_of_all(enders: tuple[int, ...]) -> None:
    """Without an average, without a loss, and after the comparison of the parameters."""

    def goes_on(member: Averager) -> Average:
        return member.strategy.average(Contribution(step=1, weight=1.0))

    group = members(3)
    outcomes = together(
        group, lambda member, i: member.strategy.compare_final() if i in enders else goes_on(member).ended_by
    )
    names = tuple(group[i].link.cluster for i in enders)
    assert outcomes == [None if i in enders else names for i in range(3)]
    assert [len(member.link.members) for member in group] == [3] * 3
    fill(group[2].model, 5)
    group[2].exchange.refresh_digests()
    for sentence in refusals(
        group, lambda member, i: member.strategy.compare_final() if i in enders else goes_on(member)
    ):
        assert "must hold identical parameters" in sentence


def test_different_steps_are_refused_by_all() -> None:
    group = members(3)
    for sentence in refusals(group, lambda member, i: member.exchanged(step=5 + (i == 1))):
        assert "must be at the same step in round 1" in sentence
        assert "5" in sentence
        assert "6" in sentence


def test_no_weight_at_all_is_refused_by_all() -> None:
    for sentence in refusals(members(2), lambda member, i: member.exchanged(weight=0.0)):
        assert "round 1 needs a positive total weight, got {'amber': 0.0, 'birch': 0.0}" in sentence
        assert "sync_weight='equal'" in sentence


def test_the_parameter_digest_is_one_for_all() -> None:
    group = members(3)
    assert len({member.exchange.parameter_digest() for member in group}) == 1
    before = group[0].exchange.parameter_digest()
    fill(group[0].model, 3)
    group[0].exchange.refresh_digests()
    assert group[0].exchange.parameter_digest() != before


# Peers that are lost, or do not keep to the protocol


def packed(kind: Kind, payload: bytes, **fields: int) -> bytes:
    return Frame(kind, len(payload), checksum=checksum(payload), **fields).pack() + payload


def opening_of(member: Averager, **changes: Any) -> bytes:
    """The ROUND message that the member would send."""
    fields = {"step": 1, "weight": 1.0, "batch_hash": 0, **changes}
    head = _HEAD.pack(fields["step"], fields["weight"], fields["batch_hash"], 0.0, 0)
    return head + b"".join(digest.to_bytes(8, "big") for digest in member.exchange.digests) + b"\xe0"


def put(member: Averager, data: bytes) -> None:
    channel = member.link._streams["amber"].channel
    chunk = channel.reserve()
    assert chunk is not None
    chunk[: len(data)] = data
    channel.commit(len(data))


@pytest.mark.parametrize("change", [b"", b"x"])
@pytest.mark.parametrize("on_loss", ["continue", "stop"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("opening", "a ROUND message from cluster 'birch' must be 73 bytes, got"),
        ("bucket", "bucket 0 does not decode: 7 elements as fp32 must be 28 bytes, got"),
    ],
)
def test_a_payload_of_the_wrong_size_costs_its_sender_the_membership(
    what: str, reason: str, on_loss: str, change: bytes
) -> None:
    amber, birch = members(2, on_loss=on_loss)
    opening = opening_of(birch)
    if what == "opening":
        put(birch, packed(Kind.ROUND, opening + b"x" if change else opening[:-1], round=1))
    else:
        put(birch, packed(Kind.ROUND, opening, round=1))
        put(birch, packed(Kind.BUCKET, bytes(28) + b"x" if change else bytes(27), round=1))
    own = amber.flat_gradient()
    if on_loss == "stop":
        with pytest.raises(PeerLost, match=reason):
            amber.exchanged()
    else:
        np.testing.assert_array_equal(amber.exchanged().values, own)
        assert reason in amber.link.losses()["birch"].reason


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 1.7e308])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    amber, birch = members(2, on_loss="continue")
    put(birch, packed(Kind.ROUND, opening_of(birch, weight=weight), round=1))
    assert amber.exchanged().share == 1.0
    assert "weight of cluster 'birch' must be finite and not negative" in amber.link.losses()["birch"].reason


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_of_three_is_lost_in_a_round(victim: int) -> None:
    """The others repeat the round without it, and stay bit-identical."""
    group = members(3, on_loss="continue")
    own = {i: member.flat_gradient() for i, member in enumerate(group) if i != victim}

    def act(member: Averager, i: int) -> Any:
        if i == victim:
            member.link.post(Kind.ROUND, opening_of(member), round=1)
            member.link.leave("it failed", deliberate=False, linger_s=0.1)
            return None
        return [member.exchanged(step=1).values, member.exchanged(step=2).values]

    outcomes = [outcome for outcome in together(group, act) if outcome is not None]
    assert [[values.tobytes() for values in outcome] for outcome in outcomes] == [
        [values.tobytes() for values in outcomes[0]]
    ] * 2
    np.testing.assert_allclose(outcomes[0][0], np.mean(list(own.values()), axis=0), rtol=1e-6)
