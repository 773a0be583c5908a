"""Self-attention relations: how the tokens of a sample see each other, whatever the widths and heads of the models.

MiniLM (Wang et al. 2020, arXiv 2002.10957), section 3, and MiniLMv2 (Wang et al. 2020, arXiv 2012.15828), section 3.1,
which splits the vectors of all heads, side by side, into as many *relation heads* as one likes.
"""

from __future__ import annotations

import paddle

from paddlenlp_nebula.distill.losses.divergence import NEVER, log_softmax
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.precision import full_precision
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["relation_kl"]


@full_precision
def relation_kl(student: Tensor, teacher: Tensor, places: Places, heads: int) -> Tensor:
    """Mean over relation heads of KL(teacher's relation || student's relation), of queries, keys or values.

    The relation of a head is softmax(A A^T / sqrt(d)) with A of shape (length, d), d = width / heads. Padding is seen
    by nobody and counts nowhere.

    Args:
        student: queries, keys or values of all heads side by side, shape (samples, length, student's width).
        teacher: the same of the teacher, shape (samples, length, teacher's width); nothing is back-propagated into it.
        places: which positions count.
        heads: relation heads.

    Returns:
        float32, shape (rows,).

    Raises:
        NebulaError: a width is no multiple of ``heads``.
    """
    mask = paddle.to_tensor(places.mask, place=student.place)
    hidden = (1.0 - mask.astype("float32")).reshape([mask.shape[0], 1, 1, mask.shape[1]]) * NEVER
    log_q = _relations(student, heads, hidden, "student")
    log_p = _relations(teacher.detach(), heads, hidden, "teacher")
    divergence = (log_p.exp() * (log_p - log_q)).sum(axis=-1).mean(axis=1)
    return places.rows(divergence)


def _relations(vectors: Tensor, heads: int, hidden: Tensor, whose: str) -> Tensor:
    """Logarithms of the relations, shape (samples, heads, length, length)."""
    samples, length, width = vectors.shape
    if width % heads:
        raise NebulaError(
            f"the {whose}'s width must be a multiple of the {heads} relation heads, got {width}: set others"
        )
    split = vectors.astype("float32").reshape([samples, length, heads, width // heads]).transpose([0, 2, 1, 3])
    scores = paddle.matmul(split, split, transpose_y=True) * (width // heads) ** -0.5
    return log_softmax(scores + hidden)
