"""Low rank on a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle

from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.device.cast import DeviceCast
from paddlenlp_nebula.codec.device.codec import DeviceCodec
from paddlenlp_nebula.codec.device.transfer import DeviceState, Place, Tensor, number, to_device, to_host
from paddlenlp_nebula.codec.lowrank import FAINT, LowRank

__all__ = ["DeviceLowRank"]

_TINY = np.finfo(np.float32).tiny
_DEPENDENT = 1e-5
"""What is left of a column after those before it are taken out, at which it is rounding noise."""


class DeviceLowRank(DeviceCodec):
    """A matrix as the product of two thin ones, from one step of a power iteration.

    As by the host codec, but that the columns of P are made orthonormal by Gram-Schmidt (PowerSGD, Algorithm 1),
    from sums and products alone, since not all devices have a QR decomposition. A column that depends on those
    before it becomes zero; the host's becomes an arbitrary one, which adds as little.
    """

    host: LowRank

    def __init__(self, host: LowRank) -> None:
        super().__init__(host)
        self._factors = DeviceCast(host.factors)

    def encode(self, vector: Tensor, layout: Layout, state: DeviceState, turn: Turn) -> memoryview:
        parts: list[bytes] = []
        for piece in self.host.pieces(layout):
            elements = vector[piece.start : piece.stop]
            if piece.rank:
                name = f"q{piece.number}"
                matrix = elements.reshape([piece.rows, piece.columns])
                found, state[name] = self._iterate(matrix, state[name])
                parts += found
            else:
                parts.append(to_host(elements).astype("<f4", copy=False).tobytes())
        return memoryview(b"".join(parts))

    def decode(self, payload: memoryview, layout: Layout, place: Place) -> Tensor:
        return paddle.concat(list(self._decoded(payload, layout, place)))

    def _decoded(self, payload: memoryview, layout: Layout, place: Place) -> Iterator[Tensor]:
        for piece, first, second in self.host.split(payload, layout):
            if not piece.rank:
                yield to_device(np.frombuffer(first, dtype="<f4").astype(np.float32, copy=False), place)
                continue
            p = self._factors.widen(first, place).reshape([piece.rows, piece.rank])
            q = self._factors.widen(second, place).reshape([piece.rank, piece.columns])
            # Rank-one products in order, as the host adds them: no matrix product, which has an order of its own.
            matrix = p[:, :1] * q[:1]
            for k in range(1, piece.rank):
                matrix = matrix + p[:, k : k + 1] * q[k : k + 1]
            yield matrix.flatten()

    def _iterate(self, matrix: Tensor, start: Tensor) -> tuple[list[bytes], Tensor]:
        """P and Q^T for the wire, and where the next round starts, shape (columns, rank)."""
        rank, place = start.shape[1], matrix.place
        try:
            p = self._factors.narrow(_orthonormal(matrix @ start).flatten())
        except OverflowError:  # it has no element above 1, unless the product was infinite
            raise _outside(matrix) from None
        q = matrix.T @ self._factors.widen(p.data.cast("B"), place).reshape([-1, rank])
        largest = q.abs().max(axis=0, keepdim=True)
        if not float(to_host(largest).max()) * rank <= np.finfo(np.float32).max:
            raise _outside(matrix)
        unit, length = _unit(q, largest)
        found = (length > number(FAINT, place) * length.max()).astype("float32")
        return [p.tobytes(), self._factors.narrow(q.T.flatten()).tobytes()], unit * found + start * (1 - found)


def _outside(matrix: Tensor) -> OverflowError:
    largest = float(to_host(matrix.abs().max()))
    return OverflowError(f"a matrix with the largest magnitude {largest:g} has a product outside float32")


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns of length 1 at right angles, or zero, that span those of ``matrix``, shape (rows, rank)."""
    basis = paddle.zeros_like(matrix[:, :1])
    for k in range(matrix.shape[1]):
        column = matrix[:, k : k + 1]
        unit, _ = _unit(column, column.abs().max())
        left = unit
        for _ in range(2):  # once would leave them askew by the rounding of what was taken out
            left = left - (basis * (basis * left).sum(axis=0, keepdim=True)).sum(axis=1, keepdim=True)
        length = (left * left).sum().sqrt()
        independent = (length > number(_DEPENDENT, matrix.place)).astype("float32")
        basis = paddle.concat([basis, left / paddle.maximum(length, number(_TINY, matrix.place)) * independent], axis=1)
    return basis[:, 1:]


def _unit(columns: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Columns divided by their lengths, and the lengths, shape (1, columns); columns of zeros stay zeros.

    Args:
        columns: shape (rows, columns).
        largest: the largest magnitude in each: squares of small numbers would vanish, those of large ones overflow.
    """
    tiny = number(_TINY, columns.place)
    relative = columns / paddle.maximum(largest, tiny)
    length = (relative * relative).sum(axis=0, keepdim=True).sqrt()
    return relative / paddle.maximum(length, tiny), length * largest
