"""Linear algebra of tall, thin matrices that gives the same bits on every CPU.

Every sum has one fixed order, and Numba fuses no multiplication with an addition unless told to (a test looks at
the machine code), so that only operations that IEEE 754 fixes remain. BLAS and LAPACK choose their kernels by CPU
and by number of threads, and with them their rounding.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types

from paddlenlp_nebula.codec.kernels import kernel

__all__ = ["Float32Matrix", "Matrix", "cholesky", "combine", "gram", "multiply", "orthogonalise"]

Matrix: TypeAlias = npt.NDArray[np.float64]
Float32Matrix: TypeAlias = npt.NDArray[np.float32]

_MATRIX = types.Array(types.float64, 2, "C")
_TALL = types.Array(types.float32, 2, "C")
_VECTOR = types.Array(types.float64, 1, "C")

_ROWS = 8  # of a tall matrix at once, so that a sum is loaded and stored once for eight products
_SWEEPS = 60  # Jacobi needs about ten


@kernel(_MATRIX(_TALL))
def gram(tall: Float32Matrix) -> Matrix:
    """The inner products of the columns of ``tall``, shape (m, n): shape (n, n), summed from the first row to the last.

    Products of two float32 numbers are exact in float64.
    """
    rows, columns = tall.shape
    result = np.zeros((columns, columns))
    block = np.zeros((_ROWS, columns))
    for start in range(0, rows, _ROWS):
        for offset in range(_ROWS):
            for j in range(columns):
                block[offset, j] = tall[start + offset, j] if start + offset < rows else 0.0
        for i in range(columns):
            x0, x1, x2, x3 = block[0, i], block[1, i], block[2, i], block[3, i]
            x4, x5, x6, x7 = block[4, i], block[5, i], block[6, i], block[7, i]
            for j in range(i, columns):
                low = result[i, j] + x0 * block[0, j] + x1 * block[1, j] + x2 * block[2, j] + x3 * block[3, j]
                result[i, j] = low + x4 * block[4, j] + x5 * block[5, j] + x6 * block[6, j] + x7 * block[7, j]
    for i in range(columns):
        for j in range(i):
            result[i, j] = result[j, i]
    return result


@kernel(_TALL(_TALL, _MATRIX))
def combine(tall: Float32Matrix, weights: Matrix) -> Float32Matrix:
    """``tall @ weights``, shapes (m, n) and (n, k), summed in float64 from the first column to the last."""
    rows, inner = tall.shape
    columns = weights.shape[1]
    result = np.empty((rows, columns), dtype=np.float32)
    sums = np.empty(columns)
    for i in range(rows):
        sums[:] = 0.0
        whole = inner - inner % 4
        for k in range(0, whole, 4):
            x0, x1 = np.float64(tall[i, k]), np.float64(tall[i, k + 1])
            x2, x3 = np.float64(tall[i, k + 2]), np.float64(tall[i, k + 3])
            for j in range(columns):
                low = sums[j] + x0 * weights[k, j] + x1 * weights[k + 1, j]
                sums[j] = low + x2 * weights[k + 2, j] + x3 * weights[k + 3, j]
        for k in range(whole, inner):
            x0 = np.float64(tall[i, k])
            for j in range(columns):
                sums[j] += x0 * weights[k, j]
        for j in range(columns):
            result[i, j] = sums[j]
    return result


@kernel(_MATRIX(_MATRIX, _MATRIX))
def multiply(left: Matrix, right: Matrix) -> Matrix:
    """``left @ right`` of small matrices, shapes (m, n) and (n, k)."""
    rows, inner = left.shape
    result = np.zeros((rows, right.shape[1]))
    for i in range(rows):
        for k in range(inner):
            for j in range(right.shape[1]):
                result[i, j] += left[i, k] * right[k, j]
    return result


@kernel(types.Tuple((_MATRIX, types.Array(types.int64, 1, "C")))(_MATRIX, types.int64, types.float64))  # type: ignore[no-untyped-call]
def cholesky(square: Matrix, limit: int, tolerance: float) -> tuple[Matrix, npt.NDArray[np.int64]]:
    """Cholesky factor with diagonal pivoting, of a positive semi-definite matrix that may be rank-deficient.

    Args:
        square: shape (n, n), symmetric.
        limit: rows at most.
        tolerance: stop when no diagonal element of what remains is above this.

    Returns:
        factor, shape (k, n), k <= limit, with factor.T @ factor == square but for the remainder; and the k pivots:
        factor[:, pivots] is upper triangular.
    """
    size = square.shape[0]
    rest = square.copy()
    factor = np.zeros((min(limit, size), size))
    pivots = np.zeros(min(limit, size), dtype=np.int64)
    for step in range(len(pivots)):
        pivot = 0
        for j in range(1, size):
            if rest[j, j] > rest[pivot, pivot]:
                pivot = j
        if not rest[pivot, pivot] > tolerance:
            return factor[:step].copy(), pivots[:step].copy()
        pivots[step] = pivot
        root = np.sqrt(rest[pivot, pivot])
        for j in range(size):
            factor[step, j] = rest[pivot, j] / root
        for i in range(size):
            for j in range(size):
                rest[i, j] -= factor[step, i] * factor[step, j]
        rest[pivot, :] = 0.0
        rest[:, pivot] = 0.0
        for done in range(step):
            factor[step, pivots[done]] = 0.0
    return factor, pivots


@njit()
def _dot(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    whole = len(x) - len(x) % 4
    for k in range(0, whole, 4):
        s0 += x[k] * y[k]
        s1 += x[k + 1] * y[k + 1]
        s2 += x[k + 2] * y[k + 2]
        s3 += x[k + 3] * y[k + 3]
    for k in range(whole, len(x)):
        s0 += x[k] * y[k]
    return (s0 + s1) + (s2 + s3)


@njit()
def _rotate(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], cosine: float, sine: float) -> None:
    for k in range(len(x)):
        x[k], y[k] = cosine * x[k] - sine * y[k], sine * x[k] + cosine * y[k]


@kernel(_VECTOR(_MATRIX, _MATRIX))
def orthogonalise(rows: Matrix, companion: Matrix) -> npt.NDArray[np.float64]:
    """Rotate the rows of a matrix, in place, until they are mutually orthogonal, longest first: a one-sided Jacobi SVD.

    With rows = U S V.T, ``rows`` becomes S V.T and ``companion`` becomes U.T @ companion.
    (Golub, Van Loan, Matrix Computations, 8.6.3; de Rijk 1989 for the order.)

    Args:
        rows: shape (k, n).
        companion: shape (k, any), rotated along.

    Returns:
        The singular values, shape (k,), descending; zeros are zero to within float64's precision of the largest.
    """
    count = rows.shape[0]
    norms = np.empty(count)
    for _ in range(_SWEEPS):
        rotated = False
        for i in range(count):
            norms[i] = _dot(rows[i], rows[i])
        for i in range(count - 1):
            # the longest of the rest comes next
            longest = i + np.argmax(norms[i:])
            if longest != i:
                for k in range(rows.shape[1]):
                    rows[i, k], rows[longest, k] = rows[longest, k], rows[i, k]
                for k in range(companion.shape[1]):
                    companion[i, k], companion[longest, k] = companion[longest, k], companion[i, k]
                norms[i], norms[longest] = norms[longest], norms[i]
            for j in range(i + 1, count):
                inner = _dot(rows[i], rows[j])
                if abs(inner) <= 1e-15 * np.sqrt(norms[i]) * np.sqrt(norms[j]) or inner == 0.0:
                    continue
                rotated = True
                zeta = (norms[j] - norms[i]) / (2.0 * inner)
                tangent = 1.0 / (abs(zeta) + np.sqrt(1.0 + zeta * zeta))
                if zeta < 0.0:
                    tangent = -tangent
                cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
                _rotate(rows[i], rows[j], cosine, cosine * tangent)
                _rotate(companion[i], companion[j], cosine, cosine * tangent)
                norms[i] = _dot(rows[i], rows[i])
                norms[j] = _dot(rows[j], rows[j])
        if not rotated:
            break
    return np.sqrt(norms)
