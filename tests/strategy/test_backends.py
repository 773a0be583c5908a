"""Members with unlike backends: one keeps its vectors on the host, the other in tensors beside its parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.backend.backend import Backend
from paddlenlp_nebula.backend.device import DeviceBackend
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.strategy.every_step import Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.tensors import gradient, write

from ..link.clusters import NAMES
from .members import Member, links, together

DEVICE = DeviceBackend(paddle.zeros([1]).place)
MIXED, HOSTS, DEVICES = (HOST, DEVICE), (HOST, HOST), (DEVICE, DEVICE)
SPECS = ["fp32", "bf16", "int8", "int4:stochastic", "topk:1/4,2bit", "lowrank:1", "randomk:0.5", "dgc:0.25"]
SAME_PAYLOADS = ("fp32", "bf16", "int8", "randomk:0.5")
"""Codecs whose payloads do not depend on the backend (int8: but for ties)."""


def codec_of(spec: str) -> Codec:
    codec = codec_from_spec(spec)
    return codec if codec.lossless or codec.own_feedback else ErrorFeedback(codec, 0.9)


class Unlike(Member):
    """A member with a backend of its own and both strategies."""

    def __init__(self, link: Any, backend: Backend, spec: str, fragments: int = 1, **local: Any) -> None:
        self.backend, self.fragments, self.local = backend, fragments, local
        super().__init__(link, spec)

    def prepare(self, codec: str) -> None:
        super().prepare(codec)
        self.exchange = Exchange(self.selection, codec_of(codec), self.party, self.fragments, backend=self.backend)
        self.every_step = EveryStep(self.exchange)
        outer = self.local.get("outer", OuterOptimizer("nesterov", 0.7, 0.9))
        self.local_steps = LocalSteps(
            self.exchange,
            outer,
            self.fragments,
            same_step=True,
            **{k: v for k, v in self.local.items() if k != "outer"},
        )

    def average(self, number: int, seed: int, **more: Any) -> bytes:
        """A round of gradients; what has become of them."""
        self.set_gradients(100 * number + seed)
        average = self.every_step.average(Contribution(number, 1.0 + seed, **more))
        skip, scale = bool(average.non_finite), more.get("loss_scale", 1.0)
        apply_average(
            self.selection, average.values, average.present, skip=skip, loss_scale=scale, backend=self.backend
        )
        return self.flat_gradient().tobytes()

    def merge(self, number: int, seed: int, final: bool = False) -> None:
        """Some local steps and a round."""
        rng = np.random.default_rng(100 * number + seed)
        for parameter in self.selection.parameters:
            write(parameter, parameter.numpy().ravel() + rng.standard_normal(parameter.size, dtype=np.float32))
        merge = self.local_steps.merge(LocalWork(number, 1.0 + seed, final=final))
        parameters = self.selection.parameters
        apply_merge(
            self.selection,
            self.exchange.buckets,
            merge.parts,
            merge.values,
            lambda index, values: write(parameters[index], values),
        )


def group_of(backends: tuple[Backend, ...], spec: str, *args: Any, **more: Any) -> list[Unlike]:
    found = zip(links(len(backends)), backends, strict=True)
    return [Unlike(link, backend, spec, *args, **more) for link, backend in found]


def anchor(member: Unlike) -> Any:
    return member.backend.to_host(member.local_steps.anchor)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_averaged_to_the_same_bits(spec: str) -> None:
    outcomes = {}
    for backends in (MIXED, HOSTS):
        group = group_of(backends, spec)
        ours, theirs = together(group, lambda member, i: [member.average(number, i) for number in (1, 2, 3)])
        assert ours == theirs
        outcomes[backends] = ours
    if spec in SAME_PAYLOADS:
        assert outcomes[MIXED] == outcomes[HOSTS]


@pytest.mark.parametrize("keep_unsent", [False, True])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("dgc")])
def test_changes_are_merged_to_the_same_bits(spec: str, keep_unsent: bool) -> None:
    outcomes = {}
    for backends in (MIXED, HOSTS):
        group = group_of(backends, spec, keep_unsent=keep_unsent, final_codec=codec_from_spec("int8"))

        def act(member: Unlike, i: int) -> list[tuple[str, bytes]]:
            seen = []
            for number in range(1, 5):
                member.merge(number, i, final=number == 4)
                seen.append((member.exchange.parameter_digest(), anchor(member).tobytes()))
            member.local_steps.compare_final(4)
            return [*seen, ("the end", member.flat().tobytes())]

        ours, theirs = together(group, act)
        assert ours == theirs
        outcomes[backends] = ours
    if spec in SAME_PAYLOADS:
        assert outcomes[MIXED] == outcomes[HOSTS]


def test_fragments_of_unlike_backends() -> None:
    outcomes = {}
    for backends in (MIXED, HOSTS):
        group = group_of(backends, "bf16", 2)

        def act(member: Unlike, i: int) -> bytes:
            for number in range(1, 6):
                member.merge(number, i, final=number == 5)
            return member.flat().tobytes()

        ours, theirs = together(group, act)
        assert ours == theirs
        outcomes[backends] = ours
    assert outcomes[MIXED] == outcomes[HOSTS]


@pytest.mark.parametrize("spec", ["fp32", "topk:1/4,2bit", "lowrank:1"])
@pytest.mark.parametrize("second", [MIXED, DEVICES, HOSTS], ids=["as before", "devices", "hosts"])
def test_a_state_is_restored_on_any_backend(spec: str, second: tuple[Backend, ...]) -> None:
    """Bit for bit as if never stopped on the same one, and on another one where payloads are the same."""
    whole, first = group_of(MIXED, spec), group_of(MIXED, spec)

    def rounds(group: list[Unlike], numbers: range) -> None:
        act = lambda member, i: [member.merge(number, i) for number in numbers]  # noqa: E731
        assert not any(isinstance(outcome, Exception) for outcome in together(group, act))

    rounds(whole, range(1, 5))
    rounds(first, range(1, 3))
    resumed = group_of(second, spec)
    for old, new in zip(first, resumed, strict=True):
        saved = {name: array.copy() for name, array in old.local_steps.state().items()}
        assert all(isinstance(array, np.ndarray) for array in saved.values())
        for mine, theirs in zip(new.selection.parameters, old.selection.parameters, strict=True):
            mine.set_value(theirs)
        new.party.number = 2
        new.local_steps.restore(saved)
        again = new.local_steps.state()
        assert {name: array.tobytes() for name, array in again.items()} == {n: a.tobytes() for n, a in saved.items()}
    rounds(resumed, range(3, 5))
    assert resumed[0].flat().tobytes() == resumed[1].flat().tobytes()
    if spec == "fp32" or second == MIXED:
        assert resumed[0].flat().tobytes() == whole[0].flat().tobytes()


@pytest.mark.parametrize("culprits", [(0,), (1,)])
def test_a_scaler_skips_the_step_on_all(culprits: tuple[int, ...]) -> None:
    group = group_of(MIXED, "topk:1/4,2bit")
    given = []
    for seed, member in enumerate(group):
        member.set_gradients(seed, scale=4.0)
        if seed in culprits:
            member.selection.parameters[2].grad[1] = math.inf
        given.append(member.flat_gradient() / 4)

    def act(member: Unlike, i: int) -> tuple[str, ...]:
        average = member.every_step.average(Contribution(1, 1.0, loss_scale=4.0, scaled=True))
        apply_average(member.selection, average.values, average.present, skip=True, backend=member.backend)
        return average.non_finite

    assert together(group, act) == [tuple(NAMES[culprit] for culprit in culprits)] * 2
    for member in group:
        for parameter in member.selection.parameters:
            assert np.isinf(gradient(parameter).numpy()).all()
        # Nothing was used, so whatever was sent is still to be sent: no bucket with an infinity was.
        for bucket in member.exchange.buckets:
            wanted = given[group.index(member)][bucket.start : bucket.stop]
            unsent = member.backend.to_host(member.exchange.unsent(bucket.index))
            np.testing.assert_allclose(unsent, wanted if np.isfinite(wanted).all() else 0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 3.0, 1024.0])
def test_loss_scales_are_taken_out_and_put_back_alike(scale: float) -> None:
    results = []
    for backends in (MIXED, HOSTS):
        group = group_of(backends, "fp32")
        results += together(group, lambda member, i: member.average(1, i, loss_scale=scale, scaled=True))
    assert len(set(results)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_on_a_device_names_the_parameter(value: float) -> None:
    (member,) = group_of((DEVICE,), "fp32")
    member.set_gradients(0)
    member.selection.parameters[1].grad[2] = value
    with pytest.raises(NebulaError, match=r"gradient of 'first\.bias' must be finite, got 1 infinite or NaN of"):
        member.every_step.average(Contribution(7, 1.0))


def test_what_does_not_fit_on_the_wire_is_the_same_error() -> None:
    sentences = []
    for backend in MIXED:
        (member,) = group_of((backend,), "fp16")
        member.set_gradients(0, scale=1e6)
        with pytest.raises(NebulaError, match="does not fit into sync_codec='fp16' in round 1") as error:
            member.every_step.average(Contribution(1, 1.0))
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]


def test_a_repeated_round_sends_the_same_and_the_last_sends_everything_once_on_a_device() -> None:
    (member,) = group_of((DEVICE,), "topk:1/4,2bit")
    change = np.random.default_rng(1).standard_normal(24, dtype=np.float32)

    def produce(bucket: Any) -> Any:
        return paddle.to_tensor(change[bucket.start : bucket.stop])

    parts, share = range(len(member.exchange.buckets)), {"amber": np.float32(1)}
    first, again = (
        member.backend.to_host(member.exchange.average(1, share, parts, produce)).tobytes() for _ in range(2)
    )
    assert first == again
    for _ in range(2):
        final = member.exchange.average(1, share, parts, produce, final=codec_from_spec("fp32"))
        np.testing.assert_allclose(member.backend.to_host(final), change, rtol=1e-5, atol=1e-6)
    member.exchange.commit()
