"""Error feedback: what a lossy codec leaves out of one round is added to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn

__all__ = ["RESIDUAL", "ErrorFeedback"]

RESIDUAL = "residual"


class ErrorFeedback(Codec):
    """A lossy codec that remembers its errors.

    ``payload = inner.encode(decay * residual + vector)``, and the residual becomes that codec's error. With
    decay 1, everything that went in has come out, or still lies in the residual. Source: Seide et al. 2014,
    "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2; a decay
    below 1 forgets old errors (Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706).

    The state holds ``residual``, float32 of shape (numel,), and what the inner codec remembers. Vectors must
    be finite, as for every codec: one infinity would stay in the residual.

    Args:
        codec: any that loses something and has no feedback of its own.
        decay: what is left of a residual after one round, from 0 to 1.
    """

    grammar = "sync_error_feedback"
    own_feedback = True

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        if codec.lossless:
            raise ValueError(f"{codec.spec} loses nothing that error feedback could give back")
        if codec.own_feedback:
            raise ValueError(f"{codec.spec} has error feedback of its own: a second one would count errors twice")
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay of error feedback must be between 0 and 1, got {decay}")
        self.codec = codec
        self.decay = decay
        self.spec = codec.spec
        self.whole_tensors = codec.whole_tensors
        self.sends_all = codec.sends_all

    @classmethod
    def parse(cls, options: Sequence[str]) -> Codec:
        raise ValueError("error feedback is no codec of its own: set sync_error_feedback")

    def init(self, layout: Layout) -> State:
        inner = self.codec.init(layout)
        assert RESIDUAL not in inner, f"{self.spec} has a {RESIDUAL} of its own"
        return {RESIDUAL: np.zeros(layout.numel, dtype=np.float32), **inner}

    def estimate(self, layout: Layout) -> int:
        return self.codec.estimate(layout)

    def bound(self, layout: Layout) -> int:
        return self.codec.bound(layout)

    def compresses(self, layout: Layout) -> bool:
        return self.codec.compresses(layout)

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        residual = state[RESIDUAL]
        if self.decay != 1:
            residual *= np.float32(self.decay)
        residual += vector
        payload = self.codec.encode(residual, layout, _inner(state), turn, error=residual)
        if error is not None:
            np.subtract(vector, self.decode(payload, layout), out=error)
        return payload

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        return self.codec.decode(payload, layout)

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        self.codec.add(payload, layout, weight, out)

    def unsent(self, state: State) -> Float32Vector | None:
        return state[RESIDUAL]

    def take_back(self, payload: memoryview, layout: Layout, state: State) -> None:
        self.codec.add(payload, layout, np.float32(1), state[RESIDUAL])
        self.codec.take_back(payload, layout, _inner(state))


def _inner(state: State) -> State:
    return {name: array for name, array in state.items() if name != RESIDUAL}
