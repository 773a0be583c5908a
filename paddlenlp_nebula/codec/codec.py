"""The contract of every codec: a float32 vector to bytes and back; what it remembers is handed in.

A codec holds settings only. What changes from round to round (the error that feedback returns, a
warm start) lies in a `State` that the caller owns, so that it can be saved in a checkpoint. All
members decode the same payloads, on whatever hardware, and must get the same bits: decoding uses
operations that IEEE 754 fixes (products and sums of elements in a given order), never a matrix
product or a sum whose order a library chooses.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from paddlenlp_nebula.errors import ProtocolError

__all__ = ["BEYOND_FLOAT32", "Codec", "Float32Vector", "Layout", "State", "Turn", "described"]

Float32Vector: TypeAlias = npt.NDArray[np.float32]
State: TypeAlias = dict[str, npt.NDArray[Any]]
"""What a codec remembers of one bucket: name -> array. ``encode`` changes the arrays in place."""

BEYOND_FLOAT32 = "what was not sent before has grown beyond float32"
"""The end of the sentence where a sum of finite vectors is not finite."""


@dataclass(frozen=True)
class Layout:
    """What a bucket's flat vector is made of.

    Attributes:
        shapes: the shapes of its tensors, or parts of tensors, in order; a part is one-dimensional.
    """

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def flat(cls, numel: int) -> Layout:
        """One tensor of shape (numel,)."""
        return cls(((numel,),))

    @cached_property
    def numel(self) -> int:
        """Elements in all."""
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where in the run a vector is encoded.

    Random choices and warm-ups depend on nothing else, so that a round after a resume yields the
    bytes that it would have yielded without.

    Attributes:
        round: exchange number, from 1.
        part: the bucket's number.
        member: this cluster's position in the configured order.
    """

    round: int
    part: int
    member: int

    @property
    def shared_seed(self) -> int:
        """64 bits, the same on all clusters."""
        return xxhash.xxh3_64_intdigest(struct.pack("!QQ", self.round, self.part))

    @property
    def own_seed(self) -> int:
        """64 bits, different on every cluster."""
        return xxhash.xxh3_64_intdigest(struct.pack("!QQQ", self.round, self.part, self.member))


class Codec(ABC):
    """Encodes one bucket at a time.

    Attributes:
        grammar: how ``sync_codec`` names the family, for messages and documentation.
        spec: the text that names this codec, in its shortest form.
        lossless: whether decode(encode(x)) == x for every finite float32 x.
        whole_tensors: whether it looks at matrices, so that no bucket may cut a tensor.
        own_feedback: whether what it does not send stays in its own state, so that error feedback
            around it would count that twice.
        sends_all: whether every element is in each payload, be it rounded.
        for_gradients: whether it takes over the optimizer's momentum, which makes sense for gradients only.
    """

    grammar: ClassVar[str]
    spec: str
    lossless: bool = False
    whole_tensors: bool = False
    own_feedback: bool = False
    sends_all: bool = True
    for_gradients: bool = False

    @classmethod
    @abstractmethod
    def parse(cls, options: Sequence[str]) -> Codec:
        """The codec of this family with the comma-separated options that follow the colon of a spec.

        Raises:
            ValueError: saying, as the end of a sentence, what an option must be.
        """

    def init(self, layout: Layout) -> State:
        """What it remembers of a bucket before the first round; empty if it remembers nothing."""
        return {}

    @abstractmethod
    def estimate(self, layout: Layout) -> int:
        """Bytes to expect of an encoded bucket: exact, or the mean for random data where the size varies."""

    def bound(self, layout: Layout) -> int:
        """Bytes of an encoded bucket at most."""
        return self.estimate(layout)

    def check_size(self, payload: memoryview, layout: Layout) -> None:
        """For codecs whose payloads have exactly the estimated size.

        Raises:
            ProtocolError: this one has another.
        """
        if payload.nbytes != self.estimate(layout):
            raise ProtocolError(
                f"{layout.numel} elements as {self.spec} must be {self.estimate(layout)} bytes, got {payload.nbytes}"
            )

    def compresses(self, layout: Layout) -> bool:
        """Whether there is anything in such a bucket that it can make smaller."""
        return True

    @abstractmethod
    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        """Bytes for a contiguous float32 vector of shape (layout.numel,), at least one element, all finite.

        Args:
            vector: left as it is, unless ``error`` is the same array.
            layout: what the vector is made of.
            state: from ``init``, and changed in place; what was not told to others.
            turn: where in the run this is.
            error: receives ``vector - decode(payload)``, shape (layout.numel,); may be ``vector`` itself.

        Returns:
            A contiguous buffer of bytes; without ``error`` it may be ``vector``'s own memory.

        Raises:
            OverflowError: a value does not fit into the wire format.
        """

    @abstractmethod
    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        """The float32 vector of shape (layout.numel,) that ``payload`` stands for; may be a read-only view of it.

        Nothing of the payload is trusted: not its length, nor any number or index in it.

        Raises:
            ProtocolError: the payload is not what ``encode`` produces for this layout.
        """

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Float32Vector) -> None:
        """``out += weight * decode(payload)``, in float32: first the product, then the sum.

        Raises:
            ProtocolError: as for ``decode``; ``out`` is left as it was.
        """
        out += weight * self.decode(payload, layout)

    def unsent(self, state: State) -> Float32Vector | None:
        """The array in the state that holds what was to be sent and was not, shape (layout.numel,), if there is one."""
        return None

    def take_back(self, payload: memoryview, layout: Layout, state: State) -> None:
        """The round came to nothing: what ``encode`` sent returns to the state, to be sent later."""
        return  # where there is no state, nothing was counted on


def described(arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, str]:
    """What is in a checkpoint's state: name -> dtype and shape."""
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
