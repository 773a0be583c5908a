"""Paddle tensors where the parameters are, and the codecs' twins there: payloads and hashed bytes alone are copied.

The rules of `codec.device.codec` hold here as well: float32 arithmetic, and operations that all devices have.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.backend.backend import Backend, Encoder, LocalProcesses, Remembered, Vector
from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State
from paddlenlp_nebula.codec.device.registry import device_codec
from paddlenlp_nebula.codec.device.transfer import Place, number, state_to_device, state_to_host, to_device, to_host
from paddlenlp_nebula.tensors import Tensor

__all__ = ["DeviceBackend", "DeviceFlat"]


class DeviceFlat:
    """A tensor for each bucket: not on all devices is a slice a view that can be written to.

    Args:
        sizes: the buckets' elements.
        place: where they lie.
    """

    def __init__(self, sizes: Sequence[int], place: Place) -> None:
        self.tensors = [paddle.zeros([size], "float32", device=place) for size in sizes]
        self._bounds = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, part: slice, /) -> Tensor:
        start, stop, _ = part.indices(len(self))
        first = min(bisect_right(self._bounds, start), len(self.tensors)) - 1
        last = max(bisect_left(self._bounds, stop), first + 1)
        if (start, stop) == (self._bounds[first], self._bounds[last]) and last == first + 1:
            return self.tensors[first]
        buckets = zip(self.tensors[first:last], self._bounds[first:last], strict=True)
        return paddle.concat([tensor[max(0, start - begin) : stop - begin] for tensor, begin in buckets])


class DeviceBackend(Backend):
    """Tensors in one device's memory.

    Args:
        place: the parameters'.
    """

    name = "device"

    def __init__(self, place: Place) -> None:
        self._place = place

    def flat(self, sizes: Sequence[int]) -> DeviceFlat:
        return DeviceFlat(sizes, self._place)

    def gather(self, bucket: Bucket, source: Callable[[int], Tensor | None]) -> Tensor:
        return paddle.concat(list(self._pieces(bucket, source)))  # a copy, even of one piece

    def _pieces(self, bucket: Bucket, source: Callable[[int], Tensor | None]) -> Iterator[Tensor]:
        for parameter, start, stop in bucket.pieces:
            if (tensor := source(parameter)) is None:
                yield paddle.zeros([stop - start], "float32", device=self._place)
            else:
                yield tensor.detach().flatten()[start:stop].astype("float32")

    def copy(self, vector: Vector) -> Tensor:
        return vector.clone()

    def fill(self, out: Vector, value: float) -> None:
        paddle.assign(paddle.full_like(out, value), out)

    def assign(self, out: Vector, vector: Vector) -> None:
        paddle.assign(vector, out)

    def add(self, out: Vector, vector: Vector, factor: np.float32 | None = None) -> None:
        out.add_(vector if factor is None else number(factor, self._place) * vector)

    def subtract(self, out: Vector, vector: Vector) -> None:
        out.subtract_(vector)

    def scale(self, out: Vector, factor: np.float32) -> None:
        out.multiply_(number(factor, self._place))

    def finite(self, vector: Vector) -> bool:
        # A finite number less itself is 0, anything else NaN: not all devices have isfinite.
        return bool(to_host((vector - vector).sum()) == 0)

    def to_host(self, numbers: Any) -> Float32Vector:
        if isinstance(numbers, DeviceFlat):
            return np.concatenate([to_host(tensor) for tensor in numbers.tensors])
        return to_host(numbers)

    def load(self, out: Any, values: npt.NDArray[Any]) -> None:
        at = 0
        for tensor in out.tensors if isinstance(out, DeviceFlat) else [out]:
            paddle.assign(to_device(values[at : at + len(tensor)], self._place), tensor)
            at += len(tensor)

    def broadcast(self, numbers: Any, local: LocalProcesses) -> None:
        for tensor in numbers.tensors:
            local.broadcast_tensor(tensor, 0)

    def encoder(self, codec: Codec) -> Encoder:
        return device_codec(codec)

    def decode(self, encoder: Any, payload: memoryview, layout: Layout) -> Tensor:
        return encoder.decode(payload, layout, self._place)

    def remember(self, state: State) -> Remembered:
        return state_to_device(state, self._place)

    def recall(self, state: Remembered) -> State:
        return state_to_host(state)
