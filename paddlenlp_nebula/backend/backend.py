"""The contract of a backend: float32 vectors, the few operations on them, and codecs for them.

Clusters of one run may use different backends, so between a payload and the parameters every backend must give the
same bits: it multiplies and adds element by element in float32, one operation after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Backend", "Encoder", "Flat", "LocalProcesses", "Remembered", "Vector"]

Vector: TypeAlias = Any
"""Float32 numbers, shape (numel,): a numpy array or a Paddle tensor."""
Remembered: TypeAlias = dict[str, Any]
"""As the codecs' `State`: name -> array or tensor."""


class Flat(Protocol):
    """The float32 numbers of several buckets, one after the other.

    A slice with a bucket's bounds is that bucket's own vector, to be read or changed; any other may be a copy.
    """

    def __getitem__(self, part: slice, /) -> Vector: ...

    def __len__(self) -> int: ...


class Encoder(Protocol):
    """What `Codec` and its twins on devices have in common; see there."""

    def encode(self, vector: Vector, layout: Layout, state: Remembered, turn: Turn) -> memoryview: ...

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Vector) -> None: ...

    def unsent(self, state: Remembered) -> Vector | None: ...

    def take_back(self, payload: memoryview, layout: Layout, state: Remembered) -> None: ...


class LocalProcesses(Protocol):
    """As `LocalGroup`."""

    def broadcast(self, vector: Float32Vector) -> None: ...

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None: ...


class Backend(ABC):
    """Holds vectors in one kind of memory.

    Attributes:
        name: as ``sync_backend`` and the report call it.
    """

    name: ClassVar[str]

    # Vectors

    @abstractmethod
    def flat(self, sizes: Sequence[int]) -> Flat:
        """Zeros for buckets of these sizes."""

    @abstractmethod
    def gather(self, bucket: Bucket, source: Callable[[int], Tensor | None]) -> Vector:
        """The bucket's elements as a fresh vector.

        Args:
            bucket: which elements.
            source: parameter number -> the tensor to read (its gradient, say); None reads as zeros.
        """

    @abstractmethod
    def copy(self, vector: Vector) -> Vector:
        """A fresh vector of the same numbers."""

    @abstractmethod
    def fill(self, out: Vector, value: float) -> None:
        """``out[:] = value``."""

    @abstractmethod
    def assign(self, out: Vector, vector: Vector) -> None:
        """``out[:] = vector``."""

    @abstractmethod
    def add(self, out: Vector, vector: Vector, factor: np.float32 | None = None) -> None:
        """``out += vector``, or ``out += factor * vector``: first the product, then the sum."""

    @abstractmethod
    def subtract(self, out: Vector, vector: Vector) -> None:
        """``out -= vector``."""

    @abstractmethod
    def scale(self, out: Vector, factor: np.float32) -> None:
        """``out *= factor``."""

    @abstractmethod
    def finite(self, vector: Vector) -> bool:
        """Whether all numbers are finite."""

    # To and from others

    @abstractmethod
    def to_host(self, numbers: Vector | Flat) -> Float32Vector:
        """The numbers in host memory, shape (numel,), to be read only: they may be a copy, or the vector itself."""

    @abstractmethod
    def load(self, out: Flat | Vector, values: npt.NDArray[Any]) -> None:
        """``out[:] = values``, from host memory, float32 of shape (numel,)."""

    @abstractmethod
    def broadcast(self, numbers: Flat, local: LocalProcesses) -> None:
        """Overwrite the numbers of all of this cluster's processes by its leader's, in place."""

    def digest(self, *vectors: Vector) -> int:
        """64 bits (xxh3) of the vectors' bytes, one vector after the other; equal on all backends.

        Vectors on a device are copied to the host for it, 4 bytes per element: with ``every_step`` all parameters after
        each step, with ``local_steps`` what a round has changed. Clusters on unlike hardware compare these hashes, and
        one that all of it computes alike would need integer arithmetic that not all devices have.
        """
        hasher = xxhash.xxh3_64()
        for vector in vectors:
            hasher.update(self.to_host(vector).data.cast("B"))
        return hasher.intdigest()

    # Codecs

    @abstractmethod
    def encoder(self, codec: Codec) -> Encoder:
        """The codec's twin for this backend's vectors.

        Raises:
            ConfigurationError: it has none.
        """

    @abstractmethod
    def decode(self, encoder: Encoder, payload: memoryview, layout: Layout) -> Vector:
        """The vector that a payload stands for, to be read only; see `Codec.decode`."""

    @abstractmethod
    def remember(self, state: State) -> Remembered:
        """What `Codec.init` gives or a checkpoint holds, for an encoder to go on with; the state is not used any more."""

    @abstractmethod
    def recall(self, state: Remembered) -> State:
        """What an encoder remembers, for a checkpoint: the same names, shapes and dtypes on all backends."""
