"""Divergences of a student's distribution over tokens from a teacher's, and cross entropy with labels.

A teacher's distribution is known in full, as logits, or as `SoftLabels`: the K most probable tokens and the mass of
all others together, the tail. Over soft labels the divergences are those of K + 1 outcomes, the tail being one: by the
data processing inequality never more than the full ones, and equal to them if K is all. Without the tail, a student
would be rewarded for a mass of 1 on the K tokens; with it, gradients reach every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from paddlenlp_nebula.distill.knowledge.soft_labels import NO_MASS
from paddlenlp_nebula.distill.precision import full_precision
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = [
    "IGNORED",
    "NEVER",
    "SoftLabels",
    "cross_entropy",
    "jensen_shannon",
    "kl",
    "log_softmax",
    "mean",
    "outcomes",
    "reverse_kl",
]

IGNORED = -100
"""The label of a row without one."""

NEVER = -1e30
"""Added to a logit: nothing of it is left, and there is no infinity that a NaN could come from."""


@dataclass(frozen=True, eq=False)
class SoftLabels:
    """A teacher's distribution at a temperature: its most probable tokens, and the rest as one.

    Attributes:
        ids: int64, shape (rows, K), no token twice in a row.
        log_probabilities: of these tokens, float32, shape (rows, K).
        log_tail: logarithm of the mass of all others, float32, shape (rows,); at most `NO_MASS` if there is none.
        tau: the temperature at which these are the probabilities, softmax(logits / tau).
    """

    ids: Tensor
    log_probabilities: Tensor
    log_tail: Tensor
    tau: float = 1.0


@full_precision
def kl(student: Tensor, teacher: Tensor | SoftLabels, tau: float = 1.0) -> Tensor:
    """tau^2 KL(teacher || student) at temperature tau.

    The factor keeps the gradient's size when tau changes: Hinton, Vinyals, Dean 2015 (arXiv 1503.02531), section 2.

    Args:
        student: logits, any floating dtype, shape (rows, V).
        teacher: logits, shape (rows, V), or soft labels given at ``tau``; nothing is back-propagated into them.
        tau: temperature, above 0.

    Returns:
        float32, shape (rows,).

    Raises:
        NebulaError: the shapes or the temperatures do not agree.
    """
    log_p, log_q = _outcomes(student, teacher, tau)
    return tau**2 * _relative_entropy(log_p, log_q)


@full_precision
def reverse_kl(student: Tensor, teacher: Tensor | SoftLabels, tau: float = 1.0) -> Tensor:
    """tau^2 KL(student || teacher): it seeks the teacher's modes (Gu et al. 2023, MiniLLM, arXiv 2306.08543).

    Over soft labels it sees nothing of what the student does within the tail: they tell less here than for `kl`, the
    more mass the student gives to tokens that the teacher did not name.

    Arguments, result and errors as for `kl`.
    """
    log_p, log_q = _outcomes(student, teacher, tau)
    return tau**2 * _relative_entropy(log_q, log_p)


@full_precision
def jensen_shannon(student: Tensor, teacher: Tensor | SoftLabels, tau: float = 1.0, beta: float = 0.5) -> Tensor:
    """tau^2 (beta KL(teacher || M) + (1 - beta) KL(student || M)), M = beta teacher + (1 - beta) student.

    The generalised Jensen-Shannon divergence of Agarwal et al. 2023 (GKD, arXiv 2306.13649), section 2. Divided by
    beta it tends to `kl` as beta tends to 0, and by 1 - beta to `reverse_kl` as beta tends to 1.

    Args:
        student, teacher, tau: as for `kl`.
        beta: between 0 and 1, both excluded.
    """
    log_p, log_q = _outcomes(student, teacher, tau)
    share = paddle.to_tensor([beta, 1.0 - beta], dtype="float32").log()
    log_m = paddle.logsumexp(paddle.stack([log_p + share[0], log_q + share[1]]), axis=0)
    return tau**2 * (beta * _relative_entropy(log_p, log_m) + (1.0 - beta) * _relative_entropy(log_q, log_m))


@full_precision
def cross_entropy(student: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(student)[label]; rows whose label is `IGNORED` are left out.

    Args:
        student: logits, shape (rows, V).
        labels: int64, shape (rows,).

    Returns:
        float32, shape (rows with a label,).
    """
    index = paddle.nonzero(labels != IGNORED).flatten()
    scores = paddle.gather(student.astype("float32"), index)
    chosen = _at(scores, paddle.gather(labels, index).unsqueeze(-1)).squeeze(-1)
    return paddle.logsumexp(scores, axis=-1) - chosen


def mean(loss: Tensor) -> Tensor:
    """The mean over rows, a scalar; 0 if there is none."""
    return loss.sum() / max(loss.shape[0], 1)


def _outcomes(student: Tensor, teacher: Tensor | SoftLabels, tau: float) -> tuple[Tensor, Tensor]:
    """Logarithms of the teacher's and the student's probabilities of the same outcomes, shape (rows, outcomes)."""
    scores = student.astype("float32") / tau
    if not isinstance(teacher, SoftLabels):
        if teacher.shape != student.shape:
            raise NebulaError(
                f"teacher and student must give logits of one shape, got {list(teacher.shape)} and "
                f"{list(student.shape)}: cut both to the shared vocabulary"
            )
        return log_softmax(teacher.detach().astype("float32") / tau), log_softmax(scores)
    if teacher.tau != tau:
        raise NebulaError(f"soft labels given at temperature {teacher.tau:g} cannot be used at {tau:g}: ask for others")
    if teacher.ids.shape[0] != student.shape[0]:
        raise NebulaError(
            f"soft labels must be for the student's {student.shape[0]} rows, got {teacher.ids.shape[0]}: "
            "are they for another batch?"
        )
    log_p = paddle.concat([teacher.log_probabilities, teacher.log_tail.unsqueeze(-1)], axis=-1)
    return log_p.detach(), outcomes(scores, teacher.ids)


def outcomes(scores: Tensor, ids: Tensor) -> Tensor:
    """Logarithms of the probabilities of some tokens, and, last, of all others together, at least `NO_MASS`.

    The tail is summed up, not taken as 1 minus the rest: that would leave a rounding error, maybe less than 0.

    Args:
        scores: logits over temperature, float32, shape (rows, V).
        ids: int64, shape (rows, K), no token twice in a row.

    Returns:
        float32, shape (rows, K + 1).
    """
    others = scores + paddle.put_along_axis(paddle.zeros_like(scores).detach(), ids, NEVER, axis=1)
    each = paddle.concat([_at(scores, ids), paddle.logsumexp(others, axis=-1, keepdim=True)], axis=-1)
    return (each - paddle.logsumexp(scores, axis=-1, keepdim=True)).clip(min=NO_MASS)


def log_softmax(scores: Tensor) -> Tensor:
    """Over the last axis, in full: Paddle's own one on a CPU cuts logarithms off at -64.

    Args:
        scores: float32, shape (..., outcomes).
    """
    return scores - paddle.logsumexp(scores, axis=-1, keepdim=True)


def _at(values: Tensor, ids: Tensor) -> Tensor:
    """values[i, ids[i, j]], shape of ``ids``."""
    return paddle.take_along_axis(values, ids, axis=1, broadcast=False)


def _relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q), shape (rows,)."""
    return (log_p.exp() * (log_p - log_q)).sum(axis=-1)
