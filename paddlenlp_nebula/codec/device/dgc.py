"""Deep Gradient Compression on a device: velocity and residual stay there."""

from __future__ import annotations

from math import inf

import numpy as np
import paddle

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.topk import DeviceTopK
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number
from paddlenlp_nebula.codec.dgc import KEPT, DeepGradientCompression

__all__ = ["DeviceDeepGradientCompression"]


class DeviceDeepGradientCompression(DeviceCodec):
    """The largest of the sums that momentum makes of all gradients so far and that have not been sent."""

    host: DeepGradientCompression

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        velocity, residual = state["velocity"], state["residual"]
        velocity.multiply_(number(self.host.momentum, velocity.place))
        velocity.add_(self._clipped(vector))
        residual.add_(velocity)
        kept = self.host.kept(turn.round)
        payload = DeviceTopK(self.host.topk(kept)).encode(residual, layout, {}, turn)
        left = residual.clone()
        DeviceTopK(self.host.topk(kept)).add(payload, layout, np.float32(-1), left)
        state["velocity"] = paddle.where(left == residual, velocity, paddle.zeros_like(velocity))
        state["residual"] = left
        return memoryview(b"".join((KEPT.pack(kept), payload)))

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        topk, rest = self.host.open(payload, layout)
        return DeviceTopK(topk).decode(rest, layout, place)

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Tensor) -> None:
        topk, rest = self.host.open(payload, layout)
        DeviceTopK(topk).add(rest, layout, weight, out)

    def take_back(self, payload: memoryview, layout: Layout, state: DeviceState) -> None:
        """What was sent returns to the residual; the velocity, there, stays 0."""
        self.add(payload, layout, np.float32(1), state["residual"])

    def _clipped(self, gradient: Tensor) -> Tensor:
        if self.host.clip == inf:
            return gradient
        one, clip = number(1.0, gradient.place), number(self.host.clip, gradient.place)
        # Squares of gradients above 1e19, and of those below 1e-19, would leave float32.
        largest = paddle.maximum(gradient.abs().max(), number(np.finfo(np.float32).tiny, gradient.place))
        relative = gradient / largest
        norm = largest * (relative * relative).sum().sqrt()
        return gradient * paddle.minimum(one, clip / norm)
