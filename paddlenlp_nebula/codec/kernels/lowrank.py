"""The product of two low-rank factors, with every sum in one order."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from paddlenlp_nebula.codec.kernels import kernel

__all__ = ["product"]

Float32Matrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]

TILE = 2048
"""Columns at a time: a row of the output (8 KiB) stays in the first-level cache while it is summed up."""


@kernel("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def product(p: Float32Matrix, q: Float32Matrix, out: Float32Matrix) -> None:
    """``out = p @ q``, as rank-one products added in order: the same bits on all hardware.

    Without fastmath a product and a sum stay two operations, each rounded; a matrix product of
    BLAS would fuse them and add in an order of its own.

    Args:
        p: shape (rows, rank), rank >= 1.
        q: shape (rank, columns).
        out: shape (rows, columns).
    """
    rows, rank = p.shape
    columns = q.shape[1]
    for start in range(0, columns, TILE):
        stop = min(start + TILE, columns)
        for i in range(rows):
            row = out[i, start:stop]
            for k in range(rank):
                factor, direction = p[i, k], q[k, start:stop]
                if k == 0:
                    for j in range(len(row)):
                        row[j] = factor * direction[j]
                else:
                    for j in range(len(row)):
                        row[j] += factor * direction[j]
