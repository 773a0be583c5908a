"""Stages, and the scheme that re-runs the teacher, give the losses of the sequential reference, to the bit."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from itertools import chain

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.blockwise.stage import Activation, recomputing, run_stage, sequential
from paddlenlp_nebula.distill.knowledge.knowledge import Extent
from paddlenlp_nebula.distill.knowledge.vectors import Hidden
from paddlenlp_nebula.errors import NebulaError

from .models import batches, pairs


def pipeline(built, ends, travel=lambda activation: activation):
    """Losses per batch from one thread for each stage, with queues between them."""
    stages = [built[start:stop] for start, stop in zip([0, *ends], [*ends, len(built)], strict=True)]
    lines = [queue.Queue(maxsize=2) for _ in ends]
    losses, failures = [None] * len(stages), []

    def work(index):
        try:
            arriving = batches() if index == 0 else iter(lines[index - 1].get, None)
            send = None if index == len(ends) else lambda activation: lines[index].put(travel(activation), timeout=20)
            losses[index] = list(run_stage(stages[index], arriving, send))
        except BaseException as failure:
            failures.append(failure)
        if index < len(ends):
            lines[index].put(None)

    threads = [threading.Thread(target=work, args=[index], daemon=True) for index in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if failures:
        raise failures[0]
    return [list(chain(*parts)) for parts in zip(*losses, strict=True)]


def weights(built):
    return [parameter.numpy() for pair in built for parameter in pair.student.parameters()]


def assert_same(one, other):
    for left, right in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("family", ["perceptron", "bert", "llama"])
@pytest.mark.parametrize("ends", [[1], [2], [1, 2]])
def test_stages_give_the_losses_of_the_reference(family, ends):
    one, other = pairs(family), pairs(family)
    expected = list(sequential(one, batches()))
    assert pipeline(other, ends) == expected
    assert_same(one, other)
    assert len({loss for losses in expected for loss in losses}) == 12  # 4 batches, 3 blocks: none is the same


def last_stage(line, answer):
    answer.put(list(run_stage(pairs("bert")[1:], iter(line.get, None), None)))


def test_a_stage_in_another_process_gives_them_too():
    context = multiprocessing.get_context("spawn")
    line, answer = context.Queue(), context.Queue()
    other = context.Process(target=last_stage, args=[line, answer], daemon=True)
    other.start()
    try:
        first = list(run_stage(pairs("bert")[:1], batches(), line.put))
        line.put(None)
        found = [one + rest for one, rest in zip(first, answer.get(timeout=90), strict=True)]
        other.join(30)
    finally:
        other.kill()
    assert found == list(sequential(pairs("bert"), batches()))


def test_what_stands_at_padding_need_not_travel():
    def rows_alone(activation):
        values = np.where(activation.mask[..., None], activation.values, np.float32(0))
        return Activation(activation.number, activation.mask, values)

    assert pipeline(pairs("bert"), [1, 2], rows_alone) == list(sequential(pairs("bert"), batches()))


def test_compressed_activations_give_nearly_the_same_losses():
    kind, sent = Hidden([1]), []

    def compressed(activation):
        rows = activation.values[activation.mask]
        extent = Extent(rows=len(rows), width=rows.shape[1])
        payload = kind.encode({"hidden.1": rows}, extent)
        sent.append(payload.nbytes / rows.size)
        values = np.zeros_like(activation.values)
        values[activation.mask] = kind.decode(payload, extent)["hidden.1"]
        return Activation(activation.number, activation.mask, values)

    found = pipeline(pairs("bert"), [1, 2], compressed)
    expected = list(sequential(pairs("bert"), batches()))
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert max(sent) <= 1.25  # bytes per number: one, and a scale for each row of 16


def test_the_scheme_that_runs_the_teacher_again_gives_them_too():
    one, other = pairs("bert"), pairs("bert")
    assert list(recomputing(one, batches())) == list(sequential(other, batches()))
    assert_same(one, other)


@pytest.mark.parametrize("scheme", [sequential, recomputing])
def test_how_often_the_teacher_runs(scheme):
    built, runs = pairs("perceptron"), []
    for index, pair in enumerate(built):
        pair.teacher.register_forward_post_hook(lambda *_, index=index: runs.append(index))
    list(scheme(built, batches(1)))
    assert sorted(runs) == ([0, 1, 2] if scheme is sequential else [0, 0, 0, 1, 1, 2])


def test_the_next_stage_gets_its_activation_before_this_one_learns():
    built, order = pairs("perceptron"), []
    before = weights(built)
    for _ in run_stage(built[:2], batches(1), lambda activation: order.append(weights(built))):
        pass
    for left, right in zip(before, order[0], strict=True):
        np.testing.assert_array_equal(left, right)
    assert any((left != right).any() for left, right in zip(before, weights(built), strict=True))


def test_a_teacher_that_overflows_is_named_and_relayed_to_nobody():
    built, relayed = pairs("perceptron"), []
    weight = built[1].teacher.layers[0][0].weight
    with paddle.no_grad():
        weight.set_value(paddle.full_like(weight, float("nan")))
    with pytest.raises(NebulaError, match=r"the teacher's activation must be finite.* sample 0, position 0 of batch 0"):
        list(run_stage(built[:2], batches(), relayed.append))
    assert not relayed
