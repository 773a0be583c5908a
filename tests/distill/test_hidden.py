"""Distances between hidden states against naive ones, and the learned projection."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_nebula.distill.losses.hidden import Projection, cosine, squared_error
from tests.distill.reference import Array, check, gradient

TEACHER = np.random.default_rng(0).standard_normal((4, 6))
STUDENT = np.random.default_rng(1).standard_normal((4, 6))


def tensor(x: Array) -> paddle.Tensor:
    return paddle.to_tensor(x.astype(np.float32))


def test_squared_error() -> None:
    check(lambda s: squared_error(s, tensor(TEACHER)), lambda s: ((s - TEACHER) ** 2).mean(axis=1), STUDENT)


def naive_cosine(student: Array) -> Array:
    norms = np.linalg.norm(student, axis=1) * np.linalg.norm(TEACHER, axis=1)
    return 1 - (student * TEACHER).sum(axis=1) / norms


def test_cosine() -> None:
    check(lambda s: cosine(s, tensor(TEACHER)), naive_cosine, STUDENT)
    np.testing.assert_allclose(cosine(tensor(3 * TEACHER), tensor(TEACHER)).numpy(), 0, atol=1e-6)
    np.testing.assert_allclose(cosine(tensor(-TEACHER), tensor(TEACHER)).numpy(), 2, atol=1e-6)


def test_the_cosine_of_zeros_is_finite() -> None:
    zeros = paddle.zeros([4, 6])
    zeros.stop_gradient = False
    value = cosine(zeros, tensor(TEACHER))
    value.sum().backward()
    np.testing.assert_array_equal(value.numpy(), 1)
    assert np.isfinite(zeros.grad.numpy()).all()


def test_the_projection_is_a_linear_map_that_learns() -> None:
    layer = Projection(3, 6)
    student = np.random.default_rng(2).standard_normal((4, 3))
    weight = layer.linear.weight.numpy().astype(np.float64)
    assert [list(parameter.shape) for parameter in layer.parameters()] == [[3, 6]]

    def naive(weight: Array) -> Array:
        return ((student @ weight - TEACHER) ** 2).mean(axis=1)

    value = squared_error(layer(tensor(student)), tensor(TEACHER))
    value.sum().backward()
    np.testing.assert_allclose(value.numpy(), naive(weight), rtol=1e-5)
    np.testing.assert_allclose(layer.linear.weight.grad.numpy(), gradient(naive, weight), rtol=1e-3, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    layer = Projection(3, 6)
    assert layer(paddle.ones([2, 3]).astype("float16")).dtype == paddle.float32
    big = paddle.full([1, 6], 6e4).astype("float16")  # its square is no float16
    assert np.isfinite(squared_error(big, -big).numpy()).all()
    np.testing.assert_allclose(cosine(big, big).numpy(), 0, atol=1e-6)
