"""Low rank: each matrix as the product of two thin ones, found by a power iteration with a warm start.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727), Algorithms 1 and 2. The paper sums P over
all workers before it computes Q, two all-reduces for each step. Here a member encodes its own vector
alone and sends both factors, one message: everybody decodes everybody's, and their average has a rank
of up to R for each member. Error feedback, around this codec, is as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from paddlenlp_nebula.codec.cast import Bfloat16, Cast, Float32
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.numbers import whole

__all__ = ["FAINT", "LowRank", "Piece"]

_FORMATS: dict[str, type[Cast]] = {"fp32": Float32, "bf16": Bfloat16}
FAINT = 1e-6
"""A direction this much weaker than the strongest is rounding noise of float32."""


class Piece(NamedTuple):
    """A tensor as a matrix: its first dimension against all others.

    Attributes:
        number: its place in the layout.
        start: of its elements in the vector.
        rows, columns: its shape.
        rank: of its factors; 0 where they would not be smaller, and its elements travel as they are.
    """

    number: int
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class LowRank(Codec):
    """A matrix (n, m) as P (n, R) and Q (m, R), of which P Q^T is the nearest that one power iteration finds.

    On the wire, tensor by tensor: P row by row and Q column by column; a vector, and a matrix whose
    factors would not be smaller, as float32. The state holds Q of each matrix, columns of length 1,
    from which the next round's iteration starts; the first ones are random and need not be the same
    on all members.

    Args:
        rank: R, at least 1; lower for matrices with a side shorter than that.
        factors: ``fp32``, or ``bf16`` for half the bytes. fp16 is no choice: a gradient's Q can lie
            wholly below its smallest number.
    """

    grammar = "lowrank:R[,fp32|bf16]"
    whole_tensors = True
    sends_all = False

    def __init__(self, rank: int, factors: str = "fp32") -> None:
        self.rank = rank
        self.factors = _FORMATS[factors]()
        self._itemsize = np.dtype(self.factors.wire).itemsize
        self.spec = f"lowrank:{rank}" + ("" if factors == "fp32" else f",{factors}")

    @classmethod
    def parse(cls, options: Sequence[str]) -> LowRank:
        if not (options and whole(options[0]) >= 1):
            raise ValueError("R must be a whole number from 1, of at most 9 digits")
        if len(options) > 2 or (len(options) == 2 and options[1] not in _FORMATS):
            raise ValueError(f"after R only one of {', '.join(_FORMATS)} may follow")
        return cls(whole(options[0]), *options[1:])

    def compresses(self, layout: Layout) -> bool:
        """Whether any tensor gets smaller: not so for vectors, and for matrices that are small or thin."""
        return any(piece.rank for piece in self.pieces(layout))

    def init(self, layout: Layout) -> State:
        from paddlenlp_nebula.codec.kernels import lowrank  # noqa: F401  compiles it now, not in a round

        state: State = {}
        for piece in self.pieces(layout):
            if piece.rank:
                start = np.random.default_rng(piece.number).standard_normal((piece.columns, piece.rank))
                state[f"q{piece.number}"] = (start / np.linalg.norm(start, axis=0)).astype(np.float32)
        return state

    def estimate(self, layout: Layout) -> int:
        return sum(self._nbytes(piece) for piece in self.pieces(layout))

    def encode(
        self, vector: Float32Vector, layout: Layout, state: State, turn: Turn, error: Float32Vector | None = None
    ) -> memoryview:
        parts: list[memoryview | bytes] = []
        for piece in self.pieces(layout):
            elements = vector[piece.start : piece.stop]
            if piece.rank:
                matrix = elements.reshape(piece.rows, piece.columns)
                parts += self._iterate(matrix, state[f"q{piece.number}"])
            else:
                parts.append(elements.astype("<f4", copy=False).tobytes())
        payload = memoryview(b"".join(parts))
        if error is not None:
            np.subtract(vector, self.decode(payload, layout), out=error)
        return payload

    def decode(self, payload: memoryview, layout: Layout) -> Float32Vector:
        from paddlenlp_nebula.codec.kernels.lowrank import product

        vector = np.empty(layout.numel, dtype=np.float32)
        for piece, first, second in self.split(payload, layout):
            elements = vector[piece.start : piece.stop]
            if piece.rank:
                p = self._factor(first, piece.rows, piece.rank)
                q = self._factor(second, piece.rank, piece.columns)
                product(p, q, elements.reshape(piece.rows, piece.columns))
            else:
                elements[:] = np.frombuffer(first, dtype="<f4")
        return vector

    def split(self, payload: memoryview, layout: Layout) -> Iterator[tuple[Piece, memoryview, memoryview]]:
        """The bytes of each piece: P and Q^T, or its elements and nothing.

        Raises:
            ProtocolError: as for ``decode``.
        """
        self.check_size(payload, layout)
        at = 0
        for piece in self.pieces(layout):
            part = payload[at : at + self._nbytes(piece)]
            at += part.nbytes
            size = piece.rows * piece.rank * self._itemsize if piece.rank else part.nbytes
            yield piece, part[:size], part[size:]

    def pieces(self, layout: Layout) -> Iterator[Piece]:
        """The tensors of a bucket, in order."""
        start = 0
        for number, shape in enumerate(layout.shapes):
            rows, columns = (shape[0], prod(shape[1:])) if len(shape) >= 2 else (1, prod(shape))
            factors = Piece(number, start, rows, columns, min(self.rank, rows, columns))
            dense = factors._replace(rank=0)
            worth_it = len(shape) >= 2 and self._nbytes(factors) < self._nbytes(dense)
            yield factors if worth_it else dense
            start = dense.stop

    def _nbytes(self, piece: Piece) -> int:
        if piece.rank:
            return (piece.rows + piece.columns) * piece.rank * self._itemsize
        return 4 * piece.rows * piece.columns

    def _iterate(
        self, matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]], start: Float32Vector
    ) -> list[memoryview]:
        """One power iteration: P and Q^T for the wire; ``start``, shape (columns, rank), becomes the next one."""
        rows, rank = len(matrix), start.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):
            product = matrix @ start
            if np.isfinite(largest := float(np.abs(product).max())):
                # Householder's QR, in float64, returns orthonormal columns even where those of the product
                # are dependent, tiny or zero.
                basis = np.linalg.qr(product.astype(np.float64))[0].astype(np.float32)
                p = self._narrow(basis)
                q = matrix.T @ self._factor(p, rows, rank)
                largest = float(np.abs(q).max())
        if not largest * rank <= np.finfo(np.float32).max:
            raise OverflowError(
                f"a matrix with the largest magnitude {float(np.abs(matrix).max()):g} has a product outside float32"
            )
        lengths = np.linalg.norm(q.astype(np.float64), axis=0)
        # Where the matrix had nothing there is nothing to learn: the old direction may meet something next time.
        found = lengths > FAINT * lengths.max()
        start[:, found] = q[:, found] / lengths[found]
        return [p, self._narrow(q.T)]

    def _narrow(self, factor: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> memoryview:
        flat = np.ascontiguousarray(factor).reshape(-1)
        return self.factors.encode(flat, Layout.flat(flat.size), {}, Turn(0, 0, 0))

    def _factor(
        self, payload: memoryview, rows: int, columns: int
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        # A copy: a payload may start at any address, and belong to a buffer that others write to.
        return np.array(self.factors.decode(payload, Layout.flat(rows * columns)).reshape(rows, columns))
