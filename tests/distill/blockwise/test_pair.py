"""One block's step against the same step written out."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.blockwise.pair import Pair, StudentBlock
from paddlenlp_nebula.distill.blockwise.stage import Activation, sequential
from paddlenlp_nebula.errors import NebulaError

from .models import batches, linear, pairs


def sgd(parameters):
    return paddle.optimizer.SGD(learning_rate=0.1, parameters=parameters)


def linear_pair(average=None):
    """A student of one linear map, without projections."""
    paddle.seed(3)
    teacher, student = linear(8), linear(8)
    return Pair(teacher, StudentBlock(student, 8), sgd, average)


def step(pair, samples=slice(None)):
    draw = np.random.default_rng(5)
    states = draw.normal(size=(4, 3, 8)).astype(np.float32)[samples]
    mask = (np.arange(3) < np.array([[3], [1], [2], [3]]))[samples]
    batch = Activation(0, mask, states)
    state, seen = batch.tensors()
    target = pair.teach(state, seen)
    return pair.learn(state, target, seen, batch.places), states[mask], target.numpy()[mask]


def test_losses_and_steps_are_those_of_the_mean_squared_error():
    pair = linear_pair()
    weight = pair.student.block.layers[0].weight.numpy().astype(np.float64)
    for _ in range(3):
        loss, rows, target = step(pair)
        error = rows @ weight - target
        assert loss == pytest.approx((error**2).mean(), rel=1e-5)
        weight -= 0.1 * 2 * rows.T @ error / error.size
        np.testing.assert_allclose(pair.student.block.layers[0].weight.numpy(), weight, rtol=1e-4, atol=1e-6)


def test_processes_that_share_a_batch_step_as_one_that_has_it_all():
    whole = linear_pair()
    step(whole)
    noted = []
    for samples in (slice(0, 1), slice(1, 4)):  # 3 and 6 rows
        step(linear_pair(lambda parameters, rows: noted.append((rows, parameters[0].grad.numpy()))), samples)
    assert [rows for rows, _ in noted] == [3, 6]
    mean = sum(rows * gradient for rows, gradient in noted) / 9

    def average(parameters, rows):
        parameters[0].grad.set_value(paddle.to_tensor(mean))

    shared = linear_pair(average)
    step(shared, slice(0, 1))
    np.testing.assert_allclose(
        shared.student.block.layers[0].weight.numpy(), whole.student.block.layers[0].weight.numpy(), rtol=1e-5
    )


@pytest.mark.parametrize("width", [8, 16])
def test_every_block_learns_and_no_teacher_changes(width):
    built = pairs("perceptron", student=(3, width))
    assert [(p.student.entry is None, p.student.exit is None) for p in built] == (
        [(True, True)] * 3 if width == 16 else [(True, False), (False, False), (False, False)]
    )
    before = [parameter.numpy() for pair in built for parameter in pair.teacher.parameters()]
    (batch,) = batches(1)
    losses = np.array(list(sequential(built, [batch] * 25)))
    assert (losses[-1] < 0.5 * losses[0]).all()
    after = [parameter.numpy() for pair in built for parameter in pair.teacher.parameters()]
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_twin_learns_by_itself():
    (pair,) = pairs("perceptron", blocks=1)
    before = [parameter.numpy() for parameter in pair.student.parameters()]
    twin = pair.twin()
    first = list(sequential([twin], batches()))
    for left, parameter in zip(before, pair.student.parameters(), strict=True):
        np.testing.assert_array_equal(left, parameter.numpy())
    assert list(sequential([pair], batches())) == first


def test_a_batch_of_padding_is_refused():
    (batch,) = batches(1)
    with pytest.raises(NebulaError, match="batch 0 must have a position that counts, got none"):
        list(sequential(pairs("perceptron"), [Activation(0, np.zeros_like(batch.mask), batch.values)]))


def test_a_student_that_diverges_is_named_and_not_stepped():
    (pair,) = pairs("perceptron", blocks=1)
    weight = pair.student.block.layers[0][0].weight
    with paddle.no_grad():
        weight.set_value(paddle.full_like(weight, float("nan")))
    before = pair.student.exit.linear.weight.numpy()
    with pytest.raises(NebulaError, match="the loss of a student's block must be a finite number, got nan at batch 0"):
        list(sequential([pair], batches()))
    np.testing.assert_array_equal(before, pair.student.exit.linear.weight.numpy())
