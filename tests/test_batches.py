"""What a batch is made of: its samples and tokens, in whatever form it comes."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddlenlp_nebula.batches import count, hash_batch
from paddlenlp_nebula.errors import NebulaError

IDS = paddle.to_tensor([[5, 6, 7, 0], [5, 6, 0, 0], [5, 0, 0, 0]])
MASK = paddle.to_tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
ATTENTION = paddle.ones([3, 1, 4, 4])
PIXELS = paddle.zeros([3, 8, 8])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, (3, 6)),
        ({"input_ids": IDS}, (3, 12)),
        ({"input_ids": IDS, "attention_mask": ATTENTION}, (3, 12)),
        ({"inputs_embeds": PIXELS, "attention_mask": MASK}, (3, 6)),
        ({"input_ids": IDS, "attention_mask": MASK * 0}, (3, 0)),
    ],
)
def test_samples_and_tokens(inputs: Any, expected: tuple[int, int]) -> None:
    assert count(inputs) == count(inputs, weighs_tokens=True) == expected


@pytest.mark.parametrize("inputs", [{"pixels": PIXELS}, {"x": PIXELS, "attention_mask": ATTENTION}, [PIXELS], PIXELS])
def test_batches_without_tokens_weigh_nothing_by_them(inputs: Any) -> None:
    assert count(inputs) == (3, 0)
    with pytest.raises(NebulaError, match=r"sync_weight='tokens' needs batches with input_ids or .* got one with"):
        count(inputs, weighs_tokens=True)


def test_a_batch_without_anything() -> None:
    assert count({}) == (0, 0)
    with pytest.raises(NebulaError, match="got one with nothing: set sync_weight='samples'"):
        count({}, weighs_tokens=True)


def test_hashes_tell_batches_apart() -> None:
    assert hash_batch({"input_ids": IDS}) == hash_batch({"input_ids": IDS + 0}) != 0
    others = [{"input_ids": IDS + 1}, {"labels": IDS}, {"input_ids": IDS.reshape([4, 3])}, [IDS]]
    assert len({hash_batch(inputs) for inputs in [{"input_ids": IDS}, *others]}) == 5
