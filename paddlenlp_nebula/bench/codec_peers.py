"""Other people's codecs, for comparison in the same run: pypiquant, and top-k as one writes it in PyTorch.

Neither is a dependency (``pip install pypiquant torch``); one that cannot be imported is named in the
result as not measured. Both work on buckets of the same size and on one thread, as the codecs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from math import ceil
from typing import Any

import numpy as np

from paddlenlp_nebula.bench.contenders import WEIGHT, Contender
from paddlenlp_nebula.codec.codec import Float32Vector, Layout

__all__ = ["PIQUANT", "TORCH", "Piquant", "TorchTopK", "peer_of"]

PIQUANT = {"int8": "pypiquant uint8", "int4": "pypiquant uint4", "int2": "pypiquant uint2"}
"""Codec -> the peer's name."""

TORCH = {"topk:64/4096,2bit": "torch topk 64/4096"}

_KEPT, _CHUNK = 64, 4096


class Piquant(Contender):
    """pypiquant 4: one scale and one zero point for a bucket, nearest rounding.

    It has no error feedback; around it goes what its user would write, with its own quantisation in between.

    Args:
        name: of its rows; its last word is the type of the codes.
        error_feedback: whether to add it.

    Raises:
        ImportError: it is not installed, or does not load.
    """

    def __init__(self, name: str, *, error_feedback: bool) -> None:
        piquant = import_module("piquant")
        self.name, self.error_feedback = name, error_feedback
        self._context = piquant.Context(num_threads=1)
        self._codes = getattr(piquant.DataType, name.rpartition(" ")[2].upper())
        self._float32, self._nearest = piquant.DataType.F32, piquant.RoundMode.NEAREST
        self._add, self._set = piquant.ReduceOp.ADD, piquant.ReduceOp.SET
        self._residuals: list[Float32Vector] = []

    def start(self, layouts: list[Layout]) -> None:
        if self.error_feedback:
            self._residuals = [np.zeros(layout.numel, dtype=np.float32) for layout in layouts]

    def encode(self, vector: Float32Vector, part: int, number: int) -> Any:
        if self.error_feedback:
            residual = self._residuals[part]
            residual += vector
            vector = residual
        numel, source = len(vector), vector.ctypes.data
        scale, zero_point = self._context.compute_quant_params_ptr_float32(source, self._codes, numel)
        codes = np.empty(ceil(numel * self._codes.bit_size / 8), dtype=np.uint8)
        self._context.quantize_ptr(
            source, self._float32, codes.ctypes.data, self._codes, numel, scale, zero_point, self._nearest
        )
        payload = (codes, scale, zero_point)
        if self.error_feedback:
            decoded = np.empty_like(vector)
            self._dequantize(payload, scale, decoded, self._set)
            vector -= decoded
        return payload

    def add(self, payload: Any, part: int, out: Float32Vector) -> None:
        self._dequantize(payload, payload[1] * float(WEIGHT), out, self._add)

    def nbytes(self, payload: Any) -> int:
        return int(payload[0].nbytes) + 4 + 8  # the scale as float32, the zero point as int64

    def _dequantize(self, payload: Any, scale: float, out: Float32Vector, how: Any) -> None:
        codes, _, zero_point = payload
        self._context.dequantize_ptr(
            codes.ctypes.data, self._codes, out.ctypes.data, self._float32, len(out), scale, zero_point, how
        )


class TorchTopK(Contender):
    """Chunk-wise top-k with error feedback in PyTorch: choose, gather, and zero what was chosen.

    Its payload is what these calls return, int64 positions and float32 values; packing them is not timed.

    Args:
        name: of its rows.

    Raises:
        ImportError: PyTorch is not installed, or does not load.
    """

    error_feedback = True

    def __init__(self, name: str) -> None:
        self._torch: Any = import_module("torch")
        self._torch.set_num_threads(1)
        self.name = name
        self._residuals: list[Any] = []

    def start(self, layouts: list[Layout]) -> None:
        self._residuals = [self._torch.zeros(layout.numel) for layout in layouts]

    def encode(self, vector: Float32Vector, part: int, number: int) -> list[Any]:
        residual = self._residuals[part]
        residual.add_(self._torch.from_numpy(vector))
        payload = []
        for chunks in _chunks(residual):
            kept = ceil(_KEPT * chunks.shape[1] / _CHUNK)
            positions = chunks.abs().topk(kept, dim=1, sorted=False).indices
            payload.append((positions, chunks.gather(1, positions)))
            chunks.scatter_(1, positions, 0.0)
        return payload

    def add(self, payload: list[Any], part: int, out: Float32Vector) -> None:
        for chunks, (positions, values) in zip(_chunks(self._torch.from_numpy(out)), payload, strict=True):
            chunks.scatter_add_(1, positions, values * float(WEIGHT))

    def nbytes(self, payload: list[Any]) -> int:
        return sum(int(tensor.nbytes) for entry in payload for tensor in entry)


def _chunks(vector: Any) -> Iterator[Any]:
    """Views of shape (chunks, 4096) and, of what remains, (1, rest)."""
    whole = len(vector) // _CHUNK * _CHUNK
    if whole:
        yield vector[:whole].view(-1, _CHUNK)
    if whole < len(vector):
        yield vector[whole:].view(1, -1)


def peer_of(codec: str, *, error_feedback: bool) -> Contender | None:
    """What a codec is compared with, if there is anything.

    Raises:
        ImportError: it cannot be imported.
    """
    if codec in PIQUANT:
        return Piquant(PIQUANT[codec], error_feedback=error_feedback)
    if codec in TORCH and error_feedback:
        return TorchTopK(TORCH[codec])
    return None
