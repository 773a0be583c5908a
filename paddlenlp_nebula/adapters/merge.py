"""The ``product`` rule: clusters' LoRA factors become one by way of what they mean, their products.

mean(A) mean(B) is not mean(A B): averaging the factors one by one is biased, and impossible where ranks differ. Here
the products are averaged, and the average is factored again, by a truncated SVD, to the rank each cluster has
(HLoRA, arXiv 2503.00813; FLoRA, arXiv 2409.05976, stacks the factors as this does). Nothing of size in x out is ever
formed: with the factors side by side, sum_i w_i s_i A_i B_i = L diag(w s) R, and L.T @ L and R @ R.T, no larger than
the sum of the ranks, hold all that the SVD needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from typing import NamedTuple

import numpy as np

from paddlenlp_nebula.adapters.kernels import Float32Matrix, Matrix, cholesky, combine, gram, multiply, orthogonalise

__all__ = ["Factors", "merge_products"]

# Inner products square the numbers, and of float64's 16 digits 8 remain: as many as the float32 factors have.
# What is smaller than this share of the whole is their rounding.
_NOISE = 2.0**-23


class Factors(NamedTuple):
    """One cluster's LoRA of one layer: the layer's weight grows by ``a @ b * scaling``.

    Attributes:
        a: float32, shape (in, rank).
        b: float32, shape (rank, out).
        scaling: PaddleNLP's ``scaling``, alpha / rank for plain LoRA.
    """

    a: Float32Matrix
    b: Float32Matrix
    scaling: float


def merge_products(
    factors: Sequence[Factors], weights: Sequence[float], rank: int, scaling: float
) -> tuple[Float32Matrix, Float32Matrix]:
    """The best factors, at one cluster's rank and scaling, of the members' weighted products.

    A @ B * scaling is the matrix of rank at most ``rank`` nearest to sum_i w_i s_i A_i B_i in the Frobenius norm
    (Eckart, Young 1936), to float32's precision.

    Of all A, B with that product, the columns of A are orthogonal and have the length that the columns of A had
    before, and B carries the singular values, largest first: the form LoRA starts from. A split in equal parts would
    make A as small as the product at the start of a training, when B is nearly zero, and jump where a singular value
    becomes zero. Directions beyond the product's own rank (all of them, as long as every B is zero) are filled from
    the A of the members with this rank, orthogonal to those in use, and their rows of B are zero: the product is the
    same, and these rows can still learn, which they could not if their columns of A were zero too. If the whole
    product is zero, A stays what it was.

    The optimizer's moments of A and B belong to other coordinates afterwards. Rotating A, B into the coordinates
    nearest to the old ones (orthogonal Procrustes) was tried on small classifiers like those of the tests: it led by
    up to 2 points of accuracy over the first rounds and trailed by 1 at the end, so it is not done.

    The same arguments give the same bytes on every CPU. Clusters of one rank and scaling thus stay identical, and
    each can compute what the others hold.

    Args:
        factors: the members', in the order of reduction; ranks and scalings may differ. A rank may exceed in or out.
        weights: the members' shares; they are not normalised.
        rank, scaling: this cluster's own.

    Returns:
        a, float32, shape (in, rank), and b, float32, shape (rank, out).

    Raises:
        ValueError: shapes that do not fit each other, or numbers that are not finite, now or once merged.
    """
    factors = [Factors(*member) for member in factors]
    _check(factors, weights, rank, scaling)
    ranks = [member.a.shape[1] for member in factors]
    gains = np.repeat([w * member.scaling / scaling for w, member in zip(weights, factors, strict=True)], ranks)
    left = np.ascontiguousarray(np.concatenate([member.a for member in factors], axis=1))
    right = np.ascontiguousarray(np.concatenate([member.b for member in factors], axis=0).T)
    inner = gram(left)
    used, rows = _decompose(inner, gram(right), gains, rank)
    before, length = _before(inner, ranks, weights, rank)
    overlap = multiply(np.ascontiguousarray(used.T), multiply(inner, before))
    # a singular vector's sign is free: nearer to the old A
    strongest = np.argmax(np.abs(overlap), axis=1)[:, None]
    sign = np.where(np.take_along_axis(overlap, strongest, axis=1)[:, 0] < 0, -1.0, 1.0)
    count = len(sign)
    if count:
        unused = _unused(inner, before - multiply(used, overlap), before, rank - count, length)
        columns = np.concatenate([used * (sign * length), unused], axis=1)
    else:
        columns = before
    b = np.zeros((rank, right.shape[0]), dtype=np.float32)
    if count:
        b[:count] = combine(right, np.ascontiguousarray((rows * (sign / length)[:, None]).T)).T
    a = combine(left, np.ascontiguousarray(columns))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("the merged factors must fit into float32, got larger ones: the members' are too large")
    return a, b


def _check(factors: Sequence[Factors], weights: Sequence[float], rank: int, scaling: float) -> None:
    if len(factors) != len(weights) or not factors:
        raise ValueError(f"each member needs one weight, got {len(factors)} members and {len(weights)} weights")
    if rank < 1 or not isfinite(scaling) or scaling == 0:
        raise ValueError(f"rank must be at least 1 and scaling finite and not 0, got {rank} and {scaling}")
    for number, (member, weight) in enumerate(zip(factors, weights, strict=True)):
        a, b = member.a, member.b
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or a.dtype != np.float32 or b.dtype != np.float32:
            raise ValueError(
                f"factors must be float32 of shapes (in, rank) and (rank, out), got {a.dtype} {a.shape} and "
                f"{b.dtype} {b.shape} from member {number}"
            )
        if (a.shape[0], b.shape[1]) != (factors[0].a.shape[0], factors[0].b.shape[1]):
            raise ValueError(
                f"all members' layers must have the same shape, got {(a.shape[0], b.shape[1])} from member {number} "
                f"and {(factors[0].a.shape[0], factors[0].b.shape[1])} from member 0"
            )
        if not (weight >= 0 and isfinite(weight) and isfinite(member.scaling)):
            raise ValueError(
                f"weights must be at least 0 and finite, and scalings finite, got {weight} and {member.scaling} "
                f"from member {number}"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueError(f"factors must be finite, got inf or nan from member {number}")


def _decompose(inner: Matrix, outer: Matrix, gains: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """The singular vectors of L diag(gains) R as combinations of the columns of L and the rows of R.

    Args:
        inner, outer: L.T @ L and R @ R.T, shape (n, n).
        gains: shape (n,).
        rank: singular vectors at most.

    Returns:
        x, shape (n, k), such that U = L @ x, and y, shape (k, n), such that S V.T = y @ R; k <= rank.
    """
    # A column times its row is one term of the sum. The two get the same length, or a term that is small because
    # its row is would count as rounding beside another whose column is short.
    lengths, widths = np.sqrt(np.diag(inner)), np.abs(gains) * np.sqrt(np.diag(outer))
    present = (lengths > 0) & (widths > 0)
    ratio = np.sqrt(np.divide(widths, lengths, out=np.ones_like(widths), where=present))
    left, right = np.where(present, ratio, 0.0), np.where(present, gains / ratio, 0.0)
    # L diag(left) = Q_L M and diag(right) R = N.T Q_R.T with orthonormal Q_L, Q_R: the SVD of M N.T is the product's
    m, n = _root(inner * left[:, None] * left), _root(outer * right[:, None] * right)
    y = m.copy()
    products = multiply(m, np.ascontiguousarray(n.T))
    singular = orthogonalise(products, y)  # M N.T becomes S Z.T, and M becomes P.T M
    whole = sqrt(fsum((m * m).ravel())) * sqrt(fsum((n * n).ravel()))
    count = min(rank, int(np.count_nonzero(singular > _NOISE * whole)))
    directions = products[:count] / (singular[:count] ** 2)[:, None]
    x = multiply(np.ascontiguousarray(n.T), np.ascontiguousarray(directions.T)) * left[:, None]
    return x, y[:count] * right


def _root(square: Matrix) -> Matrix:
    """A matrix r, shape (k, n), with r.T @ r == square, for a positive semi-definite one of rank k."""
    root: Matrix = cholesky(square, len(square), len(square) * 2.0**-52 * float(np.diag(square).max()))[0]
    return root


def _before(inner: Matrix, ranks: Sequence[int], weights: Sequence[float], rank: int) -> tuple[Matrix, float]:
    """What A of this rank was, as combinations of the columns of L, shape (n, rank), and its columns' mean length.

    It is the mean over the members of this rank; where there is none, the first columns of all. The length of columns
    that are all zero is taken for 1.
    """
    starts = np.cumsum([0, *ranks])
    total = fsum(w for w, r in zip(weights, ranks, strict=True) if r == rank)
    before = np.zeros((len(inner), rank))
    for start, other, weight in zip(starts, ranks, weights, strict=False):
        if other == rank and total > 0:
            before[start + np.arange(rank), np.arange(rank)] = weight / total
    if not total > 0:
        before[np.arange(rank) % len(inner), np.arange(rank)] = 1.0
    # squares are averaged, since means of columns that point opposite ways vanish
    squares = multiply(np.diag(inner).copy()[None, :], before)
    return before, sqrt(fsum(squares[0]) / rank) or 1.0


def _unused(inner: Matrix, rest: Matrix, before: Matrix, count: int, length: float) -> Matrix:
    """``count`` columns for A beyond those in use, as combinations of the columns of L, shape (n, count).

    Args:
        inner: L.T @ L, shape (n, n).
        rest: the old A without its part along the columns in use, shape (n, rank).
        before: the old A, shape (n, rank), for what is missing where in < rank leaves no further direction.
        count, length: how many, and how long.
    """
    squares = multiply(np.ascontiguousarray(rest.T), multiply(inner, rest))
    _, pivots = cholesky(squares, count, _NOISE * length**2)
    chosen = np.sort(pivots)
    others = np.setdiff1d(np.arange(before.shape[1]), chosen)[: count - len(chosen)]
    return np.concatenate([rest[:, chosen] * (length / np.sqrt(np.diag(squares)[chosen])), before[:, others]], axis=1)
