"""Numpy arrays and the host's codecs: tensors of any device are copied to and from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.backend.backend import Backend, Encoder, LocalProcesses, Remembered, Vector
from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State
from paddlenlp_nebula.tensors import Tensor, read_into

__all__ = ["HOST", "HostBackend"]


class HostBackend(Backend):
    """A flat is one array, and every slice of it a view."""

    name = "host"

    def flat(self, sizes: Sequence[int]) -> Float32Vector:
        return np.zeros(sum(sizes), dtype=np.float32)

    def gather(self, bucket: Bucket, source: Callable[[int], Tensor | None]) -> Float32Vector:
        vector = np.empty(bucket.numel, dtype=np.float32)
        at = 0
        for parameter, start, stop in bucket.pieces:
            out = vector[at : at + stop - start]
            tensor = source(parameter)
            if tensor is None:
                out.fill(0.0)
            else:
                read_into(tensor, start, stop, out)
            at += stop - start
        return vector

    def copy(self, vector: Vector) -> Vector:
        return vector.copy()

    def fill(self, out: Vector, value: float) -> None:
        out.fill(value)

    def assign(self, out: Vector, vector: Vector) -> None:
        out[:] = vector

    def add(self, out: Vector, vector: Vector, factor: np.float32 | None = None) -> None:
        out += vector if factor is None else factor * vector

    def subtract(self, out: Vector, vector: Vector) -> None:
        out -= vector

    def scale(self, out: Vector, factor: np.float32) -> None:
        out *= factor

    def finite(self, vector: Vector) -> bool:
        return bool(np.isfinite(vector).all())

    def to_host(self, numbers: Any) -> Float32Vector:
        array: Float32Vector = numbers
        return array

    def load(self, out: Any, values: npt.NDArray[Any]) -> None:
        out[:] = values

    def broadcast(self, numbers: Any, local: LocalProcesses) -> None:
        local.broadcast(numbers)

    def encoder(self, codec: Codec) -> Encoder:
        return codec

    def decode(self, encoder: Any, payload: memoryview, layout: Layout) -> Vector:
        return encoder.decode(payload, layout)

    def remember(self, state: State) -> Remembered:
        return state

    def recall(self, state: Remembered) -> State:
        return state


HOST = HostBackend()
