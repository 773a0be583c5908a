"""Output layers of different widths, one tokenizer."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.losses.divergence import kl
from paddlenlp_nebula.distill.vocabulary import Side, shared_vocabulary
from paddlenlp_nebula.errors import ConfigurationError


def test_padding_may_differ() -> None:
    assert shared_vocabulary(Side(151_665, 152_064), Side(151_665, 151_936)) == 151_665


def test_what_is_beyond_the_tokens_has_no_part_in_it() -> None:
    paddle.seed(0)
    shared = shared_vocabulary(Side(10, 16), Side(10, 12))
    teacher, student = paddle.randn([3, 16]), paddle.randn([3, 12])
    student.stop_gradient = False
    loss = kl(student[..., :shared], teacher[..., :shared])
    loss.sum().backward()
    np.testing.assert_array_equal(loss.numpy(), kl(student[:, :10], teacher[:, :10]).numpy())
    np.testing.assert_array_equal(student.grad.numpy()[:, 10:], 0)
    assert (student.grad.numpy()[:, :10] != 0).all()


def test_tokenizers_may_not() -> None:
    with pytest.raises(ConfigurationError, match=r"one of 30522 tokens \(teacher\) and one of 32100 \(student\)"):
        shared_vocabulary(Side(30_522, 30_522), Side(32_100, 32_128))


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        shared_vocabulary(Side(100, 90), Side(101, 90))
    assert len(caught.value.problems) == 3
    assert "the teacher's logits must be at least as many as its tokenizer's 100 tokens, got 90" in str(caught.value)
