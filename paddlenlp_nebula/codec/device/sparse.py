"""Elements of a flat tensor that are set or changed at a few places."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.codec.device.transfer import Place, Tensor, number, to_device

__all__ = ["add_at", "indices", "zeros_but"]


def indices(positions: npt.NDArray[np.int64], place: Place) -> Tensor:
    """Positions as a tensor: int32, or int64 where they need it."""
    large = len(positions) and int(positions.max()) > np.iinfo(np.int32).max
    return to_device(positions.astype(np.int64 if large else np.int32), place)


def zeros_but(numel: int, positions: npt.NDArray[np.int64], values: Tensor) -> Tensor:
    """A float32 tensor of shape (numel,), zero but at a few places.

    Args:
        numel: its elements.
        positions: int64, shape (entries,), each occurring once.
        values: float32, shape (entries,), on the device where the result will lie.
    """
    vector = paddle.zeros([numel], "float32", device=values.place)
    if not len(positions):
        return vector
    return paddle.scatter(vector, indices(positions, values.place), values, overwrite=True)


def add_at(out: Tensor, positions: npt.NDArray[np.int64], weight: np.float32, values: Tensor) -> None:
    """``out[positions] += weight * values``, in float32: first the product, then the sum.

    Args:
        out: float32, flat, changed in place.
        positions: int64, shape (entries,), each occurring once.
        weight: of all values.
        values: float32, shape (entries,).
    """
    if len(positions):
        at = indices(positions, out.place)
        paddle.scatter_(out, at, paddle.gather(out, at) + number(weight, out.place) * values, overwrite=True)
