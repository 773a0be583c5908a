"""The values of sparse entries on a device: numbers, or levels fitted to each chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.codec.device.cast import DeviceCast
from paddlenlp_nebula.codec.device.transfer import Tensor, number, to_device, to_host
from paddlenlp_nebula.codec.levels import Levels, Plain, Values

__all__ = ["Coded", "DeviceValues", "device_values"]

_PASSES = 4
_UNSENT = 255
_NORMAL = np.finfo(np.float32).tiny


class Coded(NamedTuple):
    """Values on the host, as they travel.

    Attributes:
        scales: of all chunks, as bytes.
        codes: uint32, shape (chunks, kept).
        sent: bool, shape (chunks, kept): not the zeros, nor what would decode to zero.
    """

    scales: bytes
    codes: npt.NDArray[np.uint32]
    sent: npt.NDArray[np.bool_]


class DeviceValues(ABC):
    """A tensor of values, shape (chunks, kept), to codes for `Values` to decode."""

    @abstractmethod
    def encode(self, values: Tensor) -> Coded:
        """Codes and scales.

        Raises:
            OverflowError: a value does not fit.
        """


class DevicePlain(DeviceValues):
    """A code is the number itself."""

    def __init__(self, host: Plain) -> None:
        self._cast = DeviceCast(host.cast)

    def encode(self, values: Tensor) -> Coded:
        numbers = self._cast.narrow(values.flatten()).reshape(values.shape)
        return Coded(b"", numbers.view(f"<u{numbers.itemsize}").astype(np.uint32), numbers != 0)


class DeviceLevels(DeviceValues):
    """A code is a sign and the number of a level: the fit of the host's kernel, all chunks at a time, in float32."""

    def __init__(self, host: Levels) -> None:
        self._ratios = host.ratios
        self._thresholds = (host.ratios[:, 1:] + host.ratios[:, :-1]) / 2
        highest = host.ratios[:, -1]
        self._steps = (highest[1:] + highest[:-1]) / 2
        # The largest scales with 5 significant bits at which the highest level is finite.
        self._most = (np.finfo(np.float32).max / highest).view(np.uint32) >> 19 << 19

    def encode(self, values: Tensor) -> Coded:
        magnitudes, place = values.abs(), values.place
        largest = magnitudes.max(axis=1, keepdim=True)
        scale, step = self._fit(magnitudes / paddle.maximum(largest, number(_NORMAL, place)))
        most = paddle.gather(to_device(self._most.view(np.float32), place), step).reshape([-1, 1])
        scale = paddle.minimum(_five_bits(scale * largest), most)
        code = 2 * self._nearest(magnitudes, scale, step) + (values < 0).astype("float32")
        sent = (magnitudes > 0).logical_and(scale >= number(_NORMAL, place))
        code = paddle.where(sent, code, paddle.full_like(code, _UNSENT))
        return self._coded(
            to_host(paddle.concat([scale, step.astype("float32").reshape([-1, 1])], axis=1)),
            to_host(code.astype("uint8")),
        )

    def _fit(self, relative: Tensor) -> tuple[Tensor, Tensor]:
        """Scales over largest magnitudes, shape (chunks, 1), and the numbers of the steps, int32, shape (chunks,).

        Args:
            relative: magnitudes over the largest of their chunk.
        """
        place = relative.place
        ratios, steps = to_device(self._ratios, place), to_device(self._steps, place)
        present = (relative > 0).astype("float32")
        high = relative.max(axis=1, keepdim=True)
        low = paddle.where(relative > 0, relative, paddle.ones_like(relative)).min(axis=1, keepdim=True)
        scale = low
        for _ in range(_PASSES):
            step = (high / low > steps).astype("float32").sum(axis=1).astype("int32")
            nearest = self._nearest(relative, scale, step)
            masks = [(nearest == level).astype("float32") * present for level in range(self._ratios.shape[1])]
            sums = paddle.concat([(mask * relative).sum(axis=1, keepdim=True) for mask in masks], axis=1)
            sizes = paddle.concat([mask.sum(axis=1, keepdim=True) for mask in masks], axis=1)
            ratio, one = paddle.gather(ratios, step), number(1.0, place)
            below = (ratio * ratio * sizes).sum(axis=1, keepdim=True)
            scale = (ratio * sums).sum(axis=1, keepdim=True) / paddle.maximum(below, one)
            means = sums / paddle.maximum(sizes, one)
            low = paddle.where(sizes[:, :1] > 0, means[:, :1], low)
            high = paddle.where(sizes[:, -1:] > 0, means[:, -1:], high)
        return scale, step

    def _nearest(self, magnitudes: Tensor, scale: Tensor, step: Tensor) -> Tensor:
        """The numbers of the nearest levels, float32: that of the thresholds half way which they exceed."""
        nearest = paddle.zeros_like(magnitudes)
        if self._thresholds.shape[1]:
            thresholds = scale * paddle.gather(to_device(self._thresholds, magnitudes.place), step)
            for level in range(self._thresholds.shape[1]):
                nearest += (magnitudes > thresholds[:, level : level + 1]).astype("float32")
        return nearest

    def _coded(self, scales: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8]) -> Coded:
        """On the host.

        Args:
            scales: scale and step, shape (chunks, 2).
            codes: shape (chunks, kept).
        """
        scale, step = np.ascontiguousarray(scales[:, 0]), scales[:, 1].astype(np.uint32)
        words = (scale.view(np.uint32) >> 19 << 4 | step) * (scale >= _NORMAL)
        return Coded(words.astype("<u2").tobytes(), codes.astype(np.uint32), codes != _UNSENT)


def _five_bits(scale: Tensor) -> Tensor:
    """Rounded to five significant bits, which is what a scale has on the wire.

    The splitting of Dekker 1971, "A floating-point technique for extending the available precision"; not above
    2^64, where it would overflow.
    """
    place = scale.place
    one = paddle.ones_like(scale)
    small = scale * paddle.where(scale > one, one * number(2.0**-64, place), one)
    shifted = small * number(2.0**19 + 1, place)
    rounded = shifted - (shifted - small)
    return rounded * paddle.where(scale > one, one * number(2.0**64, place), one)


def device_values(host: Values) -> DeviceValues:
    """The twin of a host format."""
    if isinstance(host, Levels):
        return DeviceLevels(host)
    assert isinstance(host, Plain), f"{type(host).__name__} has no twin on a device"
    return DevicePlain(host)
