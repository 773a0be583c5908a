"""The only copies between host and device.

A copy to the host waits for the device, so there is one per array of a payload, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.codec.codec import State

__all__ = ["DeviceState", "Place", "Tensor", "number", "state_to_device", "state_to_host", "to_device", "to_host"]

Tensor: TypeAlias = Any  # paddle.Tensor is created at run time and has no static type
Place: TypeAlias = Any
DeviceState: TypeAlias = dict[str, Tensor]
"""As the host's `State`, its arrays being tensors. ``encode`` replaces or changes them."""


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """A contiguous copy in host memory; bfloat16 as the uint16 of its bits."""
    return np.ascontiguousarray(tensor.numpy())  # on CPU a slice keeps its strides


def to_device(array: npt.NDArray[Any], place: Place) -> Tensor:
    """A copy in the memory of a device; uint16 as bfloat16, as Paddle has it."""
    # Part of a payload may start at any address.
    return paddle.to_tensor(np.require(array, requirements=["A", "C"]), place=place)


def number(value: float | np.float32, place: Place) -> Tensor:
    """A float32 scalar on a device.

    Paddle computes ``tensor * 0.3`` as ``tensor * 0.3 + 0.0``, which turns -0.0 into 0.0, and a quotient as a
    product: where the bits matter, the scalar must be a tensor.
    """
    return paddle.full([], float(value), dtype="float32", device=place)


def state_to_device(state: Mapping[str, npt.NDArray[Any]], place: Place) -> DeviceState:
    """A host codec's state, for its device twin to go on with."""
    return {name: to_device(array, place) for name, array in state.items()}


def state_to_host(state: DeviceState) -> State:
    """For a checkpoint: the names, shapes and dtypes that the host codec has."""
    return {name: to_host(tensor) for name, tensor in state.items()}
