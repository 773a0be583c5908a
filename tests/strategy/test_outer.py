"""Outer optimizers against Paddle's own and against the formulas."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.strategy.outer import OuterOptimizer


@pytest.mark.parametrize(
    ("outer", "reference"),
    [
        (OuterOptimizer("average"), lambda p: paddle.optimizer.SGD(1.0, parameters=p)),
        (OuterOptimizer("sgd", lr=0.5), lambda p: paddle.optimizer.SGD(0.5, parameters=p)),
        (OuterOptimizer("sgd", 0.7, 0.9), lambda p: paddle.optimizer.Momentum(0.7, 0.9, parameters=p)),
        (
            OuterOptimizer("nesterov", 0.7, 0.9),
            lambda p: paddle.optimizer.Momentum(0.7, 0.9, parameters=p, use_nesterov=True),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, OuterOptimizer) else "",
)
def test_it_steps_as_paddles_optimizer_does(outer: OuterOptimizer, reference) -> None:
    rng = np.random.default_rng(0)
    parameters = rng.standard_normal(50, dtype=np.float32)
    theirs = paddle.create_parameter([50], "float32")
    theirs.set_value(parameters)
    optimizer = reference([theirs])
    velocity = np.zeros(50, dtype=np.float32) if outer.has_velocity else None
    for _ in range(5):
        change = rng.standard_normal(50, dtype=np.float32)
        theirs.grad = paddle.to_tensor(-change)  # an outer gradient is the change with its sign turned
        optimizer.step()
        outer.step(HOST, parameters, change, velocity)
        np.testing.assert_allclose(parameters, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_only_momentum_needs_a_velocity() -> None:
    assert [
        OuterOptimizer(*settings).has_velocity
        for settings in [("average",), ("sgd", 0.5), ("sgd", 0.5, 0.9), ("nesterov", 0.7, 0.9)]
    ] == [False, False, True, True]
