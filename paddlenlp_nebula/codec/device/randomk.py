"""Random-k on a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.codec import DeviceCodec, check_finite
from paddlenlp_nebula.codec.device.sparse import add_at, indices, zeros_but
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor
from paddlenlp_nebula.codec.randomk import SEED, RandomK

__all__ = ["DeviceRandomK"]


class DeviceRandomK(DeviceCodec):
    """The same random elements on all clusters, as a vector of its own under another codec.

    The places come from the host's generator; 4 bytes of each are copied to the device.
    """

    host: RandomK

    def __init__(self, host: RandomK, inner: DeviceCodec) -> None:
        super().__init__(host)
        self._inner = inner

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        places = self.host.places(turn.shared_seed, layout)
        values = paddle.gather(vector, indices(places, vector.place))
        if self.host.inner.lossless:  # another codec looks by itself
            check_finite(values)
        inner = self._inner.encode(values, self.host.chosen(layout), state, turn)
        return memoryview(b"".join((SEED.pack(turn.shared_seed), inner)))

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        return zeros_but(layout.numel, *self._open(payload, layout, place))

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Tensor) -> None:
        places, values = self._open(payload, layout, out.place)
        add_at(out, places, weight, values)

    def _open(self, payload: memoryview, layout: Layout, place: Place) -> tuple[npt.NDArray[np.int64], Tensor]:
        return self.host.open(payload, layout, lambda rest, chosen: self._inner.decode(rest, chosen, place))
