"""Outer optimizers: what becomes of the averaged change of the parameters after local steps.

The averaged change is the negative of what DiLoCo (arXiv 2311.08105, Algorithm 1) calls the outer
gradient, or pseudo-gradient. All members step from the same numbers with the same elementwise
operations, so their parameters stay bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # NebulaArguments knows these names without loading Paddle
    from paddlenlp_nebula.backend.backend import Backend, Vector

__all__ = ["OUTER", "OuterOptimizer"]

OUTER = ("average", "sgd", "nesterov")


@dataclass(frozen=True)
class OuterOptimizer:
    """An outer step, in place.

    Attributes:
        name: ``average`` adds the averaged change as it is (local SGD, arXiv 1805.09767); ``sgd`` scales it by the
            learning rate, with heavy-ball momentum if that is not 0; ``nesterov`` looks ahead along the momentum
            (DiLoCo: learning rate 0.7, momentum 0.9; the step is lr * (change + momentum * velocity), as in
            ``paddle.optimizer.Momentum(use_nesterov=True)``).
        lr: outer learning rate.
        momentum: outer momentum, 0 <= momentum < 1.
    """

    name: str = "average"
    lr: float = 1.0
    momentum: float = 0.0

    @property
    def has_velocity(self) -> bool:
        """Whether it keeps a velocity, a float32 vector as long as the parameters."""
        return self.name != "average" and self.momentum > 0.0

    def step(self, backend: Backend, parameters: Vector, change: Vector, velocity: Vector | None) -> None:
        """Move parameters by an averaged change.

        Args:
            backend: of the vectors.
            parameters: shape (n,), changed in place.
            change: shape (n,); may be overwritten.
            velocity: shape (n,), changed in place, if `has_velocity`; else None.
        """
        if self.name == "average":
            backend.add(parameters, change)
            return
        lr, momentum = np.float32(self.lr), np.float32(self.momentum)
        if velocity is not None:
            backend.scale(velocity, momentum)
            backend.add(velocity, change)
            if self.name == "nesterov":
                backend.add(change, velocity, momentum)
            else:
                change = velocity
        backend.add(parameters, change, lr)
