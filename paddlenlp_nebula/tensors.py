"""Paddle tensors to and from host memory, on any device, through Paddle's own API.

The host side is always float32: float32 is what is reduced, and a bfloat16 or float16 tensor is
converted on its device before it is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import xxhash

from paddlenlp_nebula.codec.codec import Float32Vector

__all__ = [
    "Tensor",
    "gradient",
    "hash_into",
    "master_weight",
    "numel",
    "read_into",
    "set_gradient",
    "unwrapped",
    "write",
]

Tensor = Any  # paddle.Tensor is created at run time and has no static type


def numel(tensor: Tensor) -> int:
    """Number of elements."""
    return int(np.prod(tensor.shape, dtype=np.int64))


def gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that the optimizer will use: ``main_grad`` (fp32) under ``amp_master_grad``, else ``grad``."""
    if getattr(parameter, "main_grad", None) is not None:
        return parameter.main_grad
    return parameter.grad


def master_weight(optimizer: Any, parameter: Tensor) -> Tensor | None:
    """The float32 copy that the optimizer steps instead of a bfloat16 or float16 parameter, if it has one.

    Args:
        optimizer: as the Trainer's callbacks get it, wrapped any number of times.
        parameter: a parameter that it optimizes.
    """
    for layer in unwrapped(optimizer):
        weights = vars(layer).get("_master_weights")
        if weights and parameter.name in weights:
            return weights[parameter.name]
    return None


def unwrapped(optimizer: Any) -> Iterator[Any]:
    """An optimizer as the Trainer's callbacks get it, the one that it wraps, and so on; the last one is Paddle's own."""
    while optimizer is not None:
        yield optimizer
        optimizer = vars(optimizer).get("_inner_opt")


def read_into(tensor: Tensor, start: int, stop: int, out: Float32Vector) -> None:
    """Copy elements start..stop of the flattened tensor into ``out``, shape (stop - start,)."""
    if tensor.place.is_cpu_place() and tensor.dtype == paddle.float32 and tensor.is_contiguous():
        np.copyto(out, np.from_dlpack(tensor.detach()).reshape(-1)[start:stop])  # no intermediate copy
    else:
        flat = tensor.detach().flatten()
        out[:] = flat[start:stop].astype(paddle.float32).numpy()


def hash_into(digest: xxhash.xxh3_128, name: str, tensor: Tensor) -> None:
    """Add a tensor's name, shape, dtype and bytes to a hash."""
    digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
    if tensor.dtype == paddle.bfloat16 or not tensor.place.is_cpu_place():
        values = tensor.detach().cpu().numpy()
    else:
        values = tensor.detach().numpy()
    digest.update(np.ascontiguousarray(values).data.cast("B") if values.size else b"")


def write(tensor: Tensor, values: Float32Vector | Tensor) -> None:
    """Overwrite the whole tensor in place with ``values``, float32, shape (numel,), rounded to its dtype."""
    if isinstance(values, np.ndarray) and tensor.dtype == paddle.float32:
        tensor.set_value(values.reshape(tensor.shape))  # no intermediate copy
    else:
        tensor.set_value(_like(tensor, values, tensor.dtype))


def set_gradient(parameter: Tensor, values: Float32Vector | Tensor | None) -> None:
    """Replace a parameter's gradient; None takes it away, so that the optimizer leaves the parameter alone.

    Where there was no gradient, values that are a tensor may become it, and belong to the optimizer then.
    """
    current = gradient(parameter)
    if values is not None and current is not None:
        write(current, values)
        return
    master = hasattr(parameter, "main_grad")
    created = None
    if values is not None:
        dtype = paddle.float32 if master else parameter.dtype
        created = _like(parameter, values, dtype)
    if master:
        parameter.main_grad = created
    else:
        parameter.grad = created


def _like(tensor: Tensor, values: Float32Vector | Tensor, dtype: Any) -> Tensor:
    """The values in a tensor's shape and place; those of a tensor are not copied unless they must be."""
    shaped = values.reshape(tensor.shape)
    if isinstance(shaped, np.ndarray):
        shaped = paddle.to_tensor(shaped, place=tensor.place)
    return shaped.astype(dtype)
