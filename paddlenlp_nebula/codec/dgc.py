"""Deep Gradient Compression: momentum before the choice of the largest, so that late gradients are not stale ones.

Lin, Han, Mao, Wang, Dally 2018 (arXiv 1712.01887), sections 3.1 to 3.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import inf

import numpy as np

from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.numbers import decimal, spelled, whole
from paddlenlp_nebula.codec.topk import TopK
from paddlenlp_nebula.errors import ProtocolError

__all__ = ["KEPT", "DeepGradientCompression"]

KEPT = struct.Struct("<H")
"""K, before the payload of top-k."""
_CHUNK = 4096
_MOMENTUM = 0.9
_FIRST_RATIO = 0.25
"""Of the elements, in the first round of a warm-up (section 3.3)."""


class DeepGradientCompression(Codec):
    """The largest of the sums that momentum makes of all gradients so far and that have not been sent.

    Each round, with the gradient G:

        G = G * min(1, clip / |G|)        local gradient clipping, if asked for
        U = momentum * U + G              momentum correction
        V = V + U                         local accumulation
        send V and set U = V = 0          where |V| is among the largest: momentum factor masking

    The optimizer must be SGD without momentum: the momentum is here. Two choices differ from the paper,
    whose unit is a tensor: the largest are found in each chunk of 4096 elements, as by ``topk:K/4096``,
    and ``clip`` is the largest L2 norm of one bucket's gradient, since a codec sees no more. (A threshold
    for the whole gradient of N clusters becomes 1/sqrt(N) of it for one cluster's, and less for a bucket.)

    On the wire: K, 2 bytes, then ``topk:K/4096,fp32``. The state holds U (``velocity``) and V (``residual``),
    float32, shape (numel,).

    Args:
        ratio: of the elements to send, from 1/4096 to 1.
        momentum: from 0 and below 1; the optimizer's own of a run without compression.
        clip: more than 0; infinite for no clipping.
        warmup: rounds in which the ratio falls from 1/4 to ``ratio``, by the same factor each round.
    """

    grammar = "dgc:RATIO[,momentum=0.9][,clip=C][,warmup=ROUNDS]"
    own_feedback = True
    sends_all = False
    for_gradients = True

    def __init__(self, ratio: float, momentum: float = _MOMENTUM, clip: float = inf, warmup: int = 0) -> None:
        self.ratio, self.momentum, self.clip, self.warmup = ratio, momentum, clip, warmup
        options = [spelled(ratio)]
        if momentum != _MOMENTUM:
            options.append(f"momentum={spelled(momentum)}")
        if clip != inf:
            options.append(f"clip={spelled(clip)}")
        if warmup:
            options.append(f"warmup={warmup}")
        self.spec = f"dgc:{','.join(options)}"

    @classmethod
    def parse(cls, options: Sequence[str]) -> DeepGradientCompression:
        ratio = decimal(options[0] if options else "")
        if not 1 / _CHUNK <= ratio <= 1:
            raise ValueError(f"RATIO must be a number from 1/{_CHUNK} to 1")
        given = dict(option.partition("=")[::2] for option in options[1:])
        named = {"momentum": f"{_MOMENTUM}", "clip": "inf", "warmup": "0"} | given
        if len(given) < len(options) - 1 or len(named) > 3:
            raise ValueError("after RATIO only momentum=, clip= and warmup= may follow, each once")
        momentum, clip, warmup = decimal(named["momentum"]), decimal(named["clip"]), whole(named["warmup"])
        if not 0 <= np.float32(momentum) < 1:
            raise ValueError("momentum must be a number from 0 and below 1, in float32")
        if not clip > np.finfo(np.float32).tiny:
            raise ValueError("clip must be a number more than 0, in float32")
        if warmup < 0:
            raise ValueError("warmup must be a whole number of rounds, of at most 9 digits")
        if warmup and ratio >= _FIRST_RATIO:
            raise ValueError(f"a warm-up begins with {_FIRST_RATIO:g} of the elements, so RATIO must be below that")
        return cls(ratio, momentum, clip, warmup)

    def init(self, layout: Layout) -> State:
        self.topk(1).init(layout)
        return {name: np.zeros(layout.numel, dtype=np.float32) for name in ("velocity", "residual")}

    def estimate(self, layout: Layout) -> int:
        """After the warm-up."""
        return KEPT.size + self.topk(self.kept(self.warmup + 1)).estimate(layout)

    def bound(self, layout: Layout) -> int:
        # Mostly that of the first round; a few elements, of which one is sent in any case, take more bits
        # where few are expected.
        kept = (self.kept(1), self.kept(self.warmup + 1))
        return KEPT.size + max(self.topk(number).bound(layout) for number in kept)

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        velocity, residual = state["velocity"], state["residual"]
        velocity *= np.float32(self.momentum)
        velocity += self._clipped(vector)
        residual += velocity
        topk = self.topk(kept := self.kept(turn.round))
        stream = topk.encode(residual, layout, {}, turn)
        positions, values = topk.entries(stream, layout)
        sent = positions[values != 0]
        velocity[sent] = residual[sent] = 0.0  # float32 values are sent in full
        payload = KEPT.pack(kept) + stream
        if error is not None:
            np.subtract(vector, self.decode(memoryview(payload), layout), out=error)
        return memoryview(payload)

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        topk, rest = self.open(payload, layout)
        return topk.decode(rest, layout)

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        topk, rest = self.open(payload, layout)
        topk.add(rest, layout, weight, out)

    def take_back(self, payload: memoryview, layout: Layout, state: State) -> None:
        """What was sent returns to the residual; the velocity, there, stays 0."""
        self.add(payload, layout, np.float32(1), state["residual"])

    def open(self, payload: memoryview, layout: Layout) -> tuple[TopK, memoryview]:
        """The codec of the rest, and the rest."""
        what, most = f"{layout.numel} elements as {self.spec}", self.bound(layout)
        if not KEPT.size <= payload.nbytes <= most:
            raise ProtocolError(f"{what} must be {KEPT.size} to {most} bytes, got {payload.nbytes}")
        (kept,) = KEPT.unpack_from(payload)
        fewest, first = self.kept(self.warmup + 1), self.kept(1)
        if not fewest <= kept <= first:
            raise ProtocolError(f"{what} must be {fewest} to {first} of each {_CHUNK}, got {kept}")
        return self.topk(kept), payload[KEPT.size :]

    def topk(self, kept: int) -> TopK:
        return TopK(kept, _CHUNK, "fp32")

    def kept(self, number: int) -> int:
        """K in a round."""
        ratio = self.ratio
        if number <= self.warmup:
            ratio = _FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** ((number - 1) / self.warmup)
        return round(ratio * _CHUNK)

    def _clipped(self, gradient: Float32Vector) -> Float32Vector:
        if self.clip == inf:
            return gradient
        norm = np.sqrt(np.add.reduce(np.square(gradient, dtype=np.float64)))
        return gradient if norm <= self.clip else gradient * np.float32(self.clip / norm)
