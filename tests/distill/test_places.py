"""Positions that count: rows of a batch, and back."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError

MASK = np.array([[1, 1, 0], [0, 1, 0]])


def test_rows_and_back() -> None:
    places = Places.of(paddle.to_tensor(MASK))
    tensor = paddle.arange(12, dtype="float32").reshape([2, 3, 2])
    tensor.stop_gradient = False
    rows = places.rows(tensor)
    assert rows.numpy().tolist() == [[0, 1], [2, 3], [8, 9]]
    rows.sum().backward()
    np.testing.assert_array_equal(tensor.grad.numpy(), np.repeat(MASK[..., np.newaxis], 2, axis=2))
    np.testing.assert_array_equal(places.spread(rows).numpy(), tensor.numpy() * MASK[..., np.newaxis])


def test_one_row_for_each_sample() -> None:
    places = Places.of(np.array([1, 0, 1]))
    assert places.rows(paddle.eye(3)).numpy().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert places.name(1) == "sample 2 of this batch"


def test_nothing_counts() -> None:
    places = Places.of(np.zeros((2, 3)))
    rows = places.rows(paddle.ones([2, 3, 4]))
    assert rows.shape == [0, 4]
    places.check_finite(rows, "logits")


def test_another_shape_is_refused() -> None:
    with pytest.raises(NebulaError, match=r"begin with the mask's shape \[2, 3\], got \[3, 2, 4\]"):
        Places.of(MASK).rows(paddle.ones([3, 2, 4]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_named(bad: float) -> None:
    places = Places.of(MASK, "batch 7")
    tensor = np.zeros((2, 3, 2), np.float32)
    tensor[0, 2] = bad  # padding: nobody asks
    places.check_finite(places.rows(paddle.to_tensor(tensor)), "logits")
    tensor[1, 1, 1] = bad
    with pytest.raises(NebulaError, match=r"logits .* 1 of 3 positions, the first at sample 1, position 1 of batch 7"):
        places.check_finite(places.rows(paddle.to_tensor(tensor)), "logits")
