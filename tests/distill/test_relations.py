"""Relations against a naive loop over samples, heads and positions; padding takes no part in it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.losses.relations import relation_kl
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError
from tests.distill.reference import Array, check, relative_entropy, softmax

MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
TEACHER = np.random.default_rng(0).standard_normal((3, 5, 12))
STUDENT = np.random.default_rng(1).standard_normal((3, 5, 8))


def naive(student: Array, heads: int) -> Array:
    """Wang et al. 2020 (MiniLMv2), equations 4 to 6, of each position instead of their mean."""
    losses = []
    for sample, mask in enumerate(MASK):
        length = mask.sum()
        relations = []
        for vectors in (TEACHER, student):
            split = vectors[sample, :length].reshape(length, heads, -1)
            scores = np.einsum("ihd,jhd->hij", split, split) / np.sqrt(split.shape[-1])
            relations.append(softmax(scores))
        losses.append(relative_entropy(*relations).mean(axis=0))
    return np.concatenate(losses)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_it_is_the_naive_one(heads: int) -> None:
    teacher = paddle.to_tensor(TEACHER.astype(np.float32))
    check(
        lambda student: relation_kl(student, teacher, Places.of(MASK), heads),
        lambda student: naive(student, heads),
        STUDENT,
    )


def test_whatever_stands_in_padding_does_not_matter() -> None:
    places = Places.of(MASK)
    losses, gradients = [], []
    for filling in (0.0, 1e4):
        student, teacher = (np.where(MASK[..., np.newaxis], x, filling).astype(np.float32) for x in (STUDENT, TEACHER))
        tensor = paddle.to_tensor(student, stop_gradient=False)
        loss = relation_kl(tensor, paddle.to_tensor(teacher), places, 2)
        loss.sum().backward()
        losses.append(loss.numpy())
        gradients.append(tensor.grad.numpy())
    np.testing.assert_array_equal(*losses)
    np.testing.assert_array_equal(*gradients)
    np.testing.assert_array_equal(gradients[0][MASK == 0], 0)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    teacher, student = paddle.to_tensor(TEACHER.astype(np.float32)), paddle.to_tensor(STUDENT.astype(np.float32))
    with pytest.raises(NebulaError, match="student's width must be a multiple of the 3 relation heads, got 8"):
        relation_kl(student, teacher, Places.of(MASK), 3)
