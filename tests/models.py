"""Small models."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle


class Tied(paddle.nn.Layer):  # type: ignore[misc]
    """Two layers that share a weight, a frozen one, and a buffer."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(width, width)
        self.second = paddle.nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.frozen = paddle.nn.Linear(width, width)
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True
        self.register_buffer("scale", paddle.ones([2]))
        fill(self, seed)

    def forward(self, inputs: Any) -> Any:
        return self.frozen(self.second(self.first(inputs)))


def fill(model: Any, seed: int) -> None:
    """Give every parameter values that depend only on the seed."""
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        values = rng.standard_normal(parameter.shape, dtype=np.float32)
        parameter.set_value(paddle.to_tensor(values).astype(parameter.dtype))
