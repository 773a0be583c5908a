"""The positions of a batch that count: all but padding. Knowledge and losses are about these alone, as rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Places"]


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of a batch's answer belong.

    Attributes:
        mask: which positions count, bool, shape (samples, length); (samples,) where there is one row for each sample.
        batch: what the batch is called in messages.
    """

    mask: npt.NDArray[np.bool_]
    batch: str = "this batch"

    @classmethod
    def of(cls, mask: Any, batch: str = "this batch") -> Places:
        """From an attention mask or the like (array or tensor): what is not 0 counts."""
        return cls(np.asarray(mask) != 0, batch)

    @cached_property
    def flat(self) -> npt.NDArray[np.int64]:
        """Positions in the flattened batch, ascending, shape (rows,)."""
        return np.flatnonzero(self.mask)

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.flat)

    def name(self, row: int) -> str:
        """A row's place, in words."""
        place = np.unravel_index(self.flat[row], self.mask.shape)
        words = ("sample", "position")
        return ", ".join(f"{word} {int(at)}" for word, at in zip(words, place, strict=False)) + f" of {self.batch}"

    def rows(self, tensor: Tensor) -> Tensor:
        """The positions that count.

        Args:
            tensor: shape (samples, length, ...), or (samples, ...) as the mask is.

        Returns:
            Shape (rows, ...), of the same dtype (float32 for float16 on a CPU); gradients flow back to these positions
            only.
        """
        leading = self.mask.ndim
        if tuple(tensor.shape[:leading]) != self.mask.shape:
            raise NebulaError(
                f"a tensor over {self.batch} must begin with the mask's shape {list(self.mask.shape)}, "
                f"got {list(tensor.shape)}"
            )
        if tensor.dtype == paddle.float16 and tensor.place.is_cpu_place():
            tensor = tensor.astype("float32")  # there is no gathering of float16 on a CPU
        flat = tensor.reshape([-1, *tensor.shape[leading:]])
        return paddle.gather(flat, paddle.to_tensor(self.flat, place=tensor.place), axis=0)

    def spread(self, rows: Tensor) -> Tensor:
        """The reverse of `rows`: shape (samples, length, ...), zeros where nothing counts."""
        whole = paddle.zeros([self.mask.size, *rows.shape[1:]], dtype=rows.dtype)
        index = paddle.to_tensor(self.flat, place=rows.place)
        return paddle.scatter(whole, index, rows).reshape([*self.mask.shape, *rows.shape[1:]])

    def check_finite(self, rows: Tensor, what: str) -> None:
        """Look for a row with something in it that is no number.

        Args:
            rows: shape (rows, ...).
            what: it is, for the message.

        Raises:
            NebulaError: there is one; it names the first.
        """
        finite = paddle.isfinite(rows.reshape([self.count, -1])).all(axis=-1).numpy() if self.count else np.empty(0)
        (bad,) = np.nonzero(~finite.astype(bool))
        if len(bad):
            raise NebulaError(
                f"the teacher's {what} must be finite numbers, got NaN or infinity in {len(bad)} of {self.count} "
                f"positions, the first at {self.name(int(bad[0]))}: does the model overflow in this precision?"
            )
