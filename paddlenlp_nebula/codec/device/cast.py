"""Casts on a device: Paddle's own conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.codec.cast import Bfloat16, Cast, Float16, Float32
from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number, to_device, to_host

__all__ = ["DeviceCast"]

_DTYPES: dict[type[Cast], str] = {Float32: "float32", Float16: "float16", Bfloat16: "bfloat16"}
_ZERO_IN_FP16 = 2.0**-25
"""Half of fp16's smallest number: what is not larger is nearest to zero."""


class DeviceCast(DeviceCodec):
    """One number on the wire for each number in the vector."""

    host: Cast

    def __init__(self, host: Cast) -> None:
        super().__init__(host)
        self._dtype = _DTYPES[type(host)]

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        return self.narrow(vector).data.cast("B")

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        self.host.check_size(payload, layout)
        return self.widen(payload, place)

    def narrow(self, vector: Tensor) -> npt.NDArray[Any]:
        """The numbers of a flat tensor as they are on the wire, on the host.

        Raises:
            OverflowError: a value does not fit.
        """
        if self._dtype == "float16":
            # Paddle's cast on CPU makes 1.2e-7 of 4.9e-27.
            vector = vector * (vector.abs() > number(_ZERO_IN_FP16, vector.place)).astype("float32")
        numbers = to_host(vector.astype(self._dtype)).astype(self.host.wire, copy=False)
        self.host.check_range(numbers, lambda: float(to_host(vector.abs().max())))
        return numbers

    def widen(self, numbers: memoryview, place: Place) -> Tensor:
        """A flat float32 tensor of numbers as they are on the wire."""
        wire = np.frombuffer(numbers, dtype=self.host.wire)
        return to_device(wire.astype(wire.dtype.newbyteorder("="), copy=False), place).astype(paddle.float32)
