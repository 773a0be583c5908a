"""Top-k on a device: chosen and quantised there; the host gets places and codes, and puts them into a stream."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.blocks import rows
from paddlenlp_nebula.codec.device.codec import DeviceCodec, check_finite
from paddlenlp_nebula.codec.device.levels import device_values
from paddlenlp_nebula.codec.device.sparse import add_at, zeros_but
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, to_device, to_host
from paddlenlp_nebula.codec.rice import Entries, pack
from paddlenlp_nebula.codec.topk import TopK

__all__ = ["DeviceTopK"]


class DeviceTopK(DeviceCodec):
    """The elements of largest magnitude of each chunk; of equal ones any.

    For each element kept, 2 bytes of place (4 in chunks above 32768) and 1 of code (2 or 4 with fp16 or fp32) are
    copied to the host. What is received is decoded there, as it is no more than that, and scattered on the device.
    """

    host: TopK

    def __init__(self, host: TopK) -> None:
        super().__init__(host)
        self._values = device_values(host.values)

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        grid, first = self.host.grid(layout), 0
        scales, positions, codes, counts = [], [], [], []
        for chunks in rows(vector, grid.chunk):
            number, numel = chunks.shape
            kept = -(-grid.kept * numel // grid.chunk)
            places = paddle.topk(chunks.abs(), kept, axis=1, sorted=False)[1]
            chosen = paddle.take_along_axis(chunks, places, axis=1)
            check_finite(chosen)  # the largest are among them
            coded = self._values.encode(chosen)
            offsets = to_host(places.astype("int16" if grid.chunk <= 1 << 15 else "int32"))
            order = np.argsort(offsets, axis=1)
            sent = np.take_along_axis(coded.sent, order, axis=1)
            starts = first + grid.chunk * np.arange(number, dtype=np.int64)[:, np.newaxis]
            scales.append(coded.scales)
            positions.append((starts + np.take_along_axis(offsets, order, axis=1))[sent])
            codes.append(np.take_along_axis(coded.codes, order, axis=1)[sent])
            counts.append(sent.sum(axis=1, dtype=np.int32))
            first += number * numel
        entries = Entries(np.concatenate(positions), np.concatenate(counts))
        stream = pack(entries, np.concatenate(codes), self.host.values.width, grid)
        return memoryview(b"".join((*scales, stream)))

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        positions, values = self.host.entries(payload, layout)
        return zeros_but(layout.numel, positions, to_device(values, place))

    def add(self, payload: memoryview, layout: Layout, weight: np.float32, out: Tensor) -> None:
        """As `DeviceCodec.add`, but that a zero of ``out`` keeps its sign where nothing was sent."""
        positions, values = self.host.entries(payload, layout)
        add_at(out, positions, weight, to_device(values, out.place))
