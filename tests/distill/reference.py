"""Losses as their sources write them, in float64, and gradients by differences: slow and naive on purpose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import paddle

Array = npt.NDArray[np.float64]
LossOfTensor = Callable[[paddle.Tensor], paddle.Tensor]
LossOfArray = Callable[[Array], Array]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def relative_entropy(p: Array, q: Array) -> Array:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / q), 0).sum(axis=-1)


def jensen_shannon(p: Array, q: Array, beta: float) -> Array:
    m = beta * p + (1 - beta) * q
    return beta * relative_entropy(p, m) + (1 - beta) * relative_entropy(q, m)


def outcomes(p: Array, ids: npt.NDArray[np.integer]) -> Array:
    """Probabilities of the tokens in ``ids``, and of all others together."""
    kept = np.take_along_axis(p, ids, axis=1)
    others = np.stack([np.delete(row, chosen).sum() for row, chosen in zip(p, ids, strict=True)])
    return np.concatenate([kept, others[:, np.newaxis]], axis=1)


def gradient(loss: LossOfArray, x: Array, step: float = 1e-6) -> Array:
    """Of the sum of a loss over rows, by central differences, shape of ``x``."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        out[index] = (loss(up).sum() - loss(down).sum()) / (2 * step)
    return out


def check(loss: LossOfTensor, naive: LossOfArray, x: Array, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    """Value, for each row, and gradient of a loss are those of the naive one."""
    tensor = paddle.to_tensor(x.astype(np.float32), stop_gradient=False)
    value = loss(tensor)
    assert value.dtype == paddle.float32
    value.sum().backward()
    np.testing.assert_allclose(value.numpy(), naive(x), rtol=rtol, atol=atol)
    np.testing.assert_allclose(tensor.grad.numpy(), gradient(naive, x), rtol=rtol, atol=atol)
