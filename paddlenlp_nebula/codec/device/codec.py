"""The contract of every codec on a device: the host codec's payloads, from and to tensors.

Both backends write the same format, and both decode a payload to the same bits: all clusters average the
same numbers, whatever they run on. What they write may differ in a tie or in the last bit of a scale, since
an encoder's sums and quotients depend on the device; whoever decodes need not know.

Rules for the code in this folder. Only operations that Paddle has on all devices, and only float32
arithmetic: XPUs have integer ``&`` for booleans only, NPUs no float64. Decoding multiplies and adds
elements, one operation after the other: a fused one would round differently. A `Tensor` that is returned
or changed lies where the given one lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from paddlenlp_nebula.codec.codec import BEYOND_FLOAT32, Codec, Layout, Turn
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number, state_to_device, to_host

__all__ = ["DeviceCodec", "check_finite"]


class DeviceCodec(ABC):
    """Encodes one bucket at a time, as `Codec` does.

    There is no ``error`` to ask for: it is ``vector`` less what the payload decodes to, for which
    `add` with the weight -1 is there.

    Attributes:
        host: the host codec with the same payloads.
    """

    def __init__(self, host: Codec) -> None:
        self.host = host

    def init(self, layout: Layout, place: Place) -> DeviceState:
        """The host codec's first state, on a device."""
        return state_to_device(self.host.init(layout), place)

    @abstractmethod
    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        """Bytes for a float32 tensor of shape (layout.numel,), all finite, without gradient; it is left as it is.

        Raises:
            OverflowError: a value does not fit into the wire format.
        """

    @abstractmethod
    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        """The float32 tensor of shape (layout.numel,) that ``payload`` stands for.

        Raises:
            ProtocolError: the payload is not what ``encode`` produces for this layout.
        """

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Tensor) -> None:
        """``out += weight * decode(payload)``, in float32: first the product, then the sum.

        Raises:
            ProtocolError: as for ``decode``; ``out`` is left as it was.
        """
        out.add_(number(weight, out.place) * self.decode(payload, layout, out.place))

    def unsent(self, state: DeviceState) -> Tensor | None:
        """The tensor in the state that holds what was to be sent and was not, if there is one."""
        return None

    def take_back(self, payload: memoryview, layout: Layout, state: DeviceState) -> None:
        """The round came to nothing: what ``encode`` sent returns to the state, to be sent later."""
        return  # where there is no state, nothing was counted on


def check_finite(numbers: Tensor) -> None:
    """Look for what a sum of finite vectors became.

    Raises:
        OverflowError: a number is infinite, or NaN.
    """
    if to_host((numbers - numbers).sum()) != 0:  # a finite number less itself is 0, anything else NaN
        raise OverflowError(BEYOND_FLOAT32)
