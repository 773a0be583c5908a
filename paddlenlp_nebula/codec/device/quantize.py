"""Block-wise quantisation on a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.blocks import pack, rows, unpack
from paddlenlp_nebula.codec.device.codec import DeviceCodec, check_finite
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number, to_device, to_host
from paddlenlp_nebula.codec.quantize import Quantization

__all__ = ["DeviceQuantization"]


class DeviceQuantization(DeviceCodec):
    """A float32 scale for each block, and a few bits for each number.

    Stochastic rounding draws from Paddle's ``uniform`` with 31 bits of ``Turn.own_seed`` as its seed, which
    leaves the global generators alone. The same turn gives the same bytes on the same kind of device; the host
    codec's generator needs 32-bit integer arithmetic that not all devices have, and draws others.
    """

    host: Quantization

    def __init__(self, host: Quantization) -> None:
        super().__init__(host)
        self._levels = 1 << host.bits
        # A level is step * code - offset, see the host codec's kernels.
        self._step, self._offset = (1, self._levels // 2) if host.bits >= 4 else (2, self._levels - 1)

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        scales, octets = [], []
        for block, noise in zip(rows(vector, self.host.block), self._noise(vector, turn), strict=False):
            scale = self._scale(block)
            scales.append(scale.flatten())
            octets.append(pack(self._codes(block, scale, noise), self.host.bits).flatten())
        parts = to_host(paddle.concat(scales)), to_host(paddle.concat(octets).astype("uint8"))
        if (parts[0] == self.host.scale_range[1]).any():  # only what is infinite, or nearly so, has it
            check_finite(vector)
        return memoryview(b"".join((parts[0].astype("<f4", copy=False).tobytes(), parts[1].tobytes())))

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        self.host.check_size(payload, layout)
        scales, octets = self.host.parts(np.frombuffer(payload, dtype=np.uint8), layout)
        self.host.check_scales(scales)
        scale = to_device(scales.astype(np.float32, copy=False), place).reshape([-1, 1])
        bytes_ = to_device(octets, place).astype("float32")
        full, rest = divmod(layout.numel, self.host.block)
        split = full * self.host.block * self.host.bits // 8
        numbers = []
        if full:
            numbers.append(self._numbers(bytes_[:split].reshape([full, -1]), scale[:full], self.host.block))
        if rest:
            numbers.append(self._numbers(bytes_[split:].reshape([1, -1]), scale[full:], rest))
        return paddle.concat(numbers)

    def _noise(self, vector: Tensor, turn: Turn) -> Iterator[Tensor | None]:
        """Numbers from 0 to 1 in the shapes of the blocks, if they are needed."""
        if not self.host.stochastic:
            return iter((None, None))
        seed = turn.own_seed % (2**31 - 1) + 1  # 0 would mean the global generator
        drawn = paddle.uniform(vector.shape, "float32", min=0.0, max=1.0, seed=seed, device=vector.place)
        return rows(drawn, self.host.block)

    def _scale(self, block: Tensor) -> Tensor:
        """Shape (blocks, 1): 0, or a number that the host codec takes."""
        magnitude, place = block.abs(), block.place
        if self.host.by_mean and not self.host.stochastic:
            share = (0.625 if self.host.bits == 2 else 1.0) / block.shape[1]
            scale = (magnitude * number(share, place)).sum(axis=1, keepdim=True)
        else:
            largest_level = self._step * (self._levels - 1) - self._offset
            scale = magnitude.max(axis=1, keepdim=True) / number(largest_level, place)
        least, most = self.host.scale_range
        scale = paddle.minimum(scale, number(most, place))
        return paddle.where(scale >= number(least, place), scale, paddle.zeros_like(scale))

    def _codes(self, block: Tensor, scale: Tensor, noise: Tensor | None) -> Tensor:
        """Whole numbers below 2^bits, float32, shape of ``block``."""
        # Where the scale is 0 any code will do.
        scaled = block / paddle.where(scale > 0, scale, paddle.ones_like(scale)) / self._step
        between = 0.0 if self._step == 1 else 0.5  # levels lie at whole numbers, or half way between them
        if noise is None:
            code = (scaled + (0.5 - between)).floor()
        else:
            position = scaled - between
            code = position.floor()
            code = code + (noise < position - code).astype("float32")
        return (code + self._levels // 2).clip(1 if self._step == 1 else 0, self._levels - 1)

    def _numbers(self, octets: Tensor, scale: Tensor, numel: int) -> Tensor:
        """Scale times level, flat."""
        level = unpack(octets, self.host.bits, numel) * self._step - self._offset
        return (scale * level).flatten()
