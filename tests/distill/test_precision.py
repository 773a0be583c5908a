"""Losses and what a teacher tells are computed in float32, also within automatic mixed precision.

On a CPU that changes no dtypes, so it is its level that is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import pytest
from paddle.base.framework import _dygraph_tracer

from paddlenlp_nebula.distill import extract
from paddlenlp_nebula.distill.losses import divergence, hidden
from paddlenlp_nebula.distill.losses.relations import relation_kl
from paddlenlp_nebula.distill.places import Places


@contextmanager
def mixed_precision() -> Iterator[None]:
    """As ``paddle.amp.auto_cast(level="O2", dtype="bfloat16")``, which does nothing on a CPU."""
    tracer = _dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype
    tracer._amp_level, tracer._amp_dtype = LEVELS.O2, "bfloat16"
    try:
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype = before


paddle.seed(0)
LEVELS = paddle.base.core.AmpLevel
LOGITS, OTHERS = 5 * paddle.randn([6, 50]), 5 * paddle.randn([6, 50])
VECTORS, OTHER_VECTORS = paddle.randn([2, 3, 16]), paddle.randn([2, 3, 16])
PLACES = Places.of(np.ones((2, 3)))
PROJECTION = hidden.Projection(50, 50)


def soft() -> divergence.SoftLabels:
    arrays = extract.soft_labels(OTHERS.reshape([2, 3, 50]), PLACES, 8, 1.0)
    ids, *others = (paddle.to_tensor(array) for array in arrays.values())
    return divergence.SoftLabels(ids.cast("int64"), *others)


SOFT = soft()


@pytest.mark.parametrize(
    "compute",
    [
        lambda: divergence.kl(LOGITS, OTHERS, 2.0),
        lambda: divergence.kl(LOGITS, SOFT),
        lambda: divergence.reverse_kl(LOGITS, OTHERS),
        lambda: divergence.jensen_shannon(LOGITS, OTHERS),
        lambda: divergence.cross_entropy(LOGITS, paddle.arange(6)),
        lambda: hidden.squared_error(LOGITS, OTHERS),
        lambda: hidden.cosine(LOGITS, OTHERS),
        lambda: PROJECTION(LOGITS),
        lambda: relation_kl(VECTORS, OTHER_VECTORS, PLACES, 4),
        lambda: extract.vectors({"q": VECTORS}, PLACES, rank=3),
        lambda: extract.most_probable(VECTORS, PLACES),
        soft,
    ],
)
def test_it_is_off_where_something_is_computed(
    compute: Callable[[], paddle.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, levels, astype = _dygraph_tracer(), [], paddle.Tensor.astype

    def noting(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
        levels.append(tracer._amp_level)
        return astype(tensor, dtype)

    monkeypatch.setattr(paddle.Tensor, "astype", noting)
    with mixed_precision():
        compute()
        assert tracer._amp_level == LEVELS.O2
    assert levels
    assert set(levels) == {LEVELS.O0}
