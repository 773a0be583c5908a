from __future__ import annotations

import functools

import pytest

from paddlenlp_nebula.buckets import cut
from paddlenlp_nebula.strategy import exchange

BUCKET_NUMEL = 7


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 24 elements of the model make four buckets, cutting through parameters."""
    monkeypatch.setattr(exchange, "cut", functools.partial(cut, bucket_numel=BUCKET_NUMEL))
