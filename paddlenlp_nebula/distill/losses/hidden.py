"""Distances between hidden states, the student's being mapped to the teacher's width by a layer that is learned, too."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_nebula.distill.precision import full_precision
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Projection", "cosine", "squared_error"]


class Projection(nn.Layer):
    """A linear map without bias from the student's width to the teacher's, thrown away after training.

    TinyBERT (Jiao et al. 2019, arXiv 1909.10351), equation 8. Where the teacher sends fewer coordinates than it has
    (``hidden:...,lowrank:R``), their number is its width.

    Args:
        student_width, teacher_width: of the hidden states.
    """

    def __init__(self, student_width: int, teacher_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(student_width, teacher_width, bias_attr=False)

    @full_precision
    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (rows, student_width), any floating dtype, to float32, shape (rows, teacher_width)."""
        return paddle.matmul(hidden.astype("float32"), self.linear.weight.astype("float32"))


@full_precision
def squared_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over the width of (student - teacher)^2 (TinyBERT, equation 8).

    Args:
        student: shape (rows, width), after `Projection`.
        teacher: the same shape; nothing is back-propagated into it.

    Returns:
        float32, shape (rows,).
    """
    return (student.astype("float32") - teacher.detach().astype("float32")).square().mean(axis=-1)


@full_precision
def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine of the angle between them (DistilBERT, Sanh et al. 2019, arXiv 1910.01108); 1 if one is zero.

    Arguments and result as for `squared_error`.
    """
    one, other = (_unit(side.astype("float32")) for side in (student, teacher.detach()))
    return 1.0 - (one * other).sum(axis=-1)


def _unit(rows: Tensor) -> Tensor:
    """Of length 1; a zero stays one, with a finite gradient."""
    return rows * paddle.rsqrt(rows.square().sum(axis=-1, keepdim=True) + 1e-12)
