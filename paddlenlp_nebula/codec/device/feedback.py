"""Error feedback on a device: the residual stays there."""

from __future__ import annotations

import numpy as np

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number
from paddlenlp_nebula.codec.feedback import RESIDUAL, ErrorFeedback

__all__ = ["DeviceErrorFeedback"]


class DeviceErrorFeedback(DeviceCodec):
    """A lossy codec that remembers its errors.

    The residual is ``decay * residual + vector`` less what the payload decodes to, so that whatever a device's
    arithmetic did to the payload is in it.
    """

    host: ErrorFeedback

    def __init__(self, host: ErrorFeedback, inner: DeviceCodec) -> None:
        super().__init__(host)
        self._inner = inner

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        residual, others = _split(state)
        if self.host.decay != 1:
            residual.multiply_(number(self.host.decay, residual.place))
        residual.add_(vector)
        payload = self._inner.encode(residual, layout, others, turn)
        state.update(others)
        self._inner.add(payload, layout, np.float32(-1), residual)
        return payload

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        return self._inner.decode(payload, layout, place)

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Tensor) -> None:
        self._inner.add(payload, layout, weight, out)

    def unsent(self, state: DeviceState) -> Tensor | None:
        return state[RESIDUAL]

    def take_back(self, payload: memoryview, layout: Layout, state: DeviceState) -> None:
        residual, others = _split(state)
        self._inner.add(payload, layout, np.float32(1), residual)
        self._inner.take_back(payload, layout, others)


def _split(state: DeviceState) -> tuple[Tensor, DeviceState]:
    """The residual, and what the inner codec remembers."""
    return state[RESIDUAL], {name: tensor for name, tensor in state.items() if name != RESIDUAL}
