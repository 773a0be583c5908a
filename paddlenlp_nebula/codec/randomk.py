"""Random-k: the same random elements on all clusters, which then need no indices on the wire."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.cast import Float32
from paddlenlp_nebula.codec.codec import BEYOND_FLOAT32, Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.numbers import decimal, spelled
from paddlenlp_nebula.errors import ProtocolError

__all__ = ["SEED", "RandomK"]

SEED = struct.Struct("<Q")
"""The seed of the choice, before the other codec's payload."""

Vector = TypeVar("Vector")


class RandomK(Codec):
    """A fraction P of the elements, chosen anew each round, as a vector of its own under another codec.

    On the wire: the seed of the choice, 8 bytes, then what the other codec makes of the ceil(P n)
    chosen elements. With ``topk:...`` as the other one this is the sampling of CocktailSGD (Wang et
    al., ICML 2023, "CocktailSGD: fine-tuning foundation models over 500Mbps networks"):
    a cheap choice first, so that the dear one looks at few elements.

    The sample is stratified, one random element of each P-th part of the vector, rather than any
    k of n. The elements keep their values. Textbook random-k multiplies them by 1/P, which makes the
    mean right and the variance 1/P times as large; here error feedback sends later what is left out,
    and a larger value would be sent twice. Without error feedback the average shrinks to P of itself.

    Args:
        fraction: P, more than 0 and at most 1.
        inner: the codec of the chosen elements, one that `takes`; float32 if None.
    """

    grammar = "randomk:P[+CODEC]"

    def __init__(self, fraction: float, inner: Codec | None = None) -> None:
        self.fraction = fraction
        self.inner = inner or Float32()
        self.spec = f"randomk:{spelled(fraction)}"
        if self.inner.spec != Float32.grammar:
            self.spec += f"+{self.inner.spec}"
        self.lossless = fraction == 1 and self.inner.lossless
        self.sends_all = fraction == 1 and self.inner.sends_all

    @classmethod
    def parse(cls, options: Sequence[str]) -> RandomK:
        fraction = decimal(options[0]) if len(options) == 1 else 0.0
        if not 0 < fraction <= 1:
            raise ValueError("P must be one number, more than 0 and at most 1")
        return cls(fraction)

    @classmethod
    def takes(cls, inner: type[Codec]) -> bool:
        """Whether a codec can follow the ``+``: one without memory of matrices, or of elements, that are others each round."""
        return not (inner.whole_tensors or inner.own_feedback or issubclass(inner, RandomK))

    def init(self, layout: Layout) -> State:
        from paddlenlp_nebula.codec.kernels import randomk  # noqa: F401  compiles it now, not in a round

        return self.inner.init(self.chosen(layout))

    def estimate(self, layout: Layout) -> int:
        return SEED.size + self.inner.estimate(self.chosen(layout))

    def bound(self, layout: Layout) -> int:
        return SEED.size + self.inner.bound(self.chosen(layout))

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        places = self.places(turn.shared_seed, layout)
        values = vector[places]
        if self.inner.lossless and not np.isfinite(values).all():  # another codec looks by itself
            raise OverflowError(BEYOND_FLOAT32)
        rest = None if error is None else values
        payload = SEED.pack(turn.shared_seed) + self.inner.encode(values, self.chosen(layout), state, turn, rest)
        if error is not None:
            if error is not vector:
                error[:] = vector
            error[places] = values
        return memoryview(payload)

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        places, values = self.open(payload, layout, self.inner.decode)
        vector = np.zeros(layout.numel, dtype=np.float32)
        vector[places] = values
        return vector

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        places, values = self.open(payload, layout, self.inner.decode)
        out[places] += weight * values

    def open(
        self, payload: memoryview, layout: Layout, decode: Callable[[memoryview, Layout], Vector]
    ) -> tuple[npt.NDArray[np.int64], Vector]:
        """The places of the chosen elements, and what ``decode`` makes of the other codec's payload."""
        least = SEED.size
        if payload.nbytes < least:
            raise ProtocolError(
                f"{layout.numel} elements as {self.spec} must be at least {least} bytes, got {payload.nbytes}"
            )
        try:
            values = decode(payload[least:], self.chosen(layout))
        except ProtocolError as error:
            raise ProtocolError(f"{layout.numel} elements as {self.spec}, after {least} bytes: {error}") from error
        return self.places(SEED.unpack_from(payload)[0], layout), values

    def chosen(self, layout: Layout) -> Layout:
        """What the other codec sees."""
        share = Fraction(repr(self.fraction))  # the decimal number that was asked for, without its rounding
        return Layout.flat(-(-layout.numel * share.numerator // share.denominator))

    def places(self, seed: int, layout: Layout) -> npt.NDArray[np.int64]:
        """Where the chosen elements are, in ascending order."""
        from paddlenlp_nebula.codec.kernels.randomk import choose

        places = np.empty(self.chosen(layout).numel, dtype=np.int64)
        choose(np.uint64(seed), np.uint64(layout.numel), places)
        return places
