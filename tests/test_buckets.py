"""Buckets: contiguous, complete, and what they hold is what the parameters hold."""

from __future__ import annotations

import numpy as np
import paddle
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.buckets import BUCKET_NUMEL, cut
from paddlenlp_nebula.link.frames import HEADER_BYTES
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.transport.channel import CHUNK_BYTES


def selection_of(sizes: list[int]) -> Selection:
    start = 0
    parameters = []
    for index, size in enumerate(sizes):
        parameters.append((f"p{index}", paddle.arange(start, start + size, dtype="float32")))
        start += size
    return Selection(parameters)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50))
def test_buckets_cover_everything_once_and_in_order(sizes: list[int], bucket_numel: int) -> None:
    selection = selection_of(sizes)
    buckets = cut(selection, bucket_numel)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.numel for bucket in buckets[:-1]] == [bucket_numel] * (len(buckets) - 1)
    gathered = [HOST.gather(bucket, selection.parameters.__getitem__) for bucket in buckets]
    assert [len(vector) for vector in gathered] == [bucket.numel for bucket in buckets]
    np.testing.assert_array_equal(np.concatenate(gathered), np.arange(sum(sizes)))
    assert buckets[-1].stop == selection.numel


def test_a_bucket_fits_into_a_chunk() -> None:
    assert HEADER_BYTES + 4 * BUCKET_NUMEL <= CHUNK_BYTES


def test_a_parameter_may_be_cut_and_a_bucket_may_hold_several() -> None:
    first, second = cut(selection_of([3, 5, 2]), 6)
    assert first.pieces == ((0, 0, 3), (1, 0, 3))
    assert second.pieces == ((1, 3, 5), (2, 0, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50))
def test_whole_tensors_are_not_cut(sizes: list[int], bucket_numel: int) -> None:
    selection = selection_of(sizes)
    buckets = cut(selection, bucket_numel, whole_tensors=True)
    assert [piece for bucket in buckets for piece in bucket.pieces] == [(i, 0, size) for i, size in enumerate(sizes)]
    assert all(bucket.numel >= bucket_numel for bucket in buckets[:-1])
    assert [bucket.start for bucket in buckets[1:]] + [selection.numel] == [bucket.stop for bucket in buckets]


def test_the_layout_has_the_shape_of_what_is_whole() -> None:
    selection = Selection([("a", paddle.ones([2, 3])), ("b", paddle.ones([4, 2]))])
    first, second = cut(selection, 10)
    assert first.layout.shapes == ((2, 3), (4,))
    assert second.layout.shapes == ((4,),)
    assert cut(selection, 10, whole_tensors=True)[0].layout.shapes == ((2, 3), (4, 2))


def test_an_empty_parameter_has_no_piece() -> None:
    selection = Selection([("a", paddle.ones([2])), ("none", paddle.zeros([0])), ("b", paddle.ones([2]))])
    (bucket,) = cut(selection, 10)
    assert bucket.pieces == ((0, 0, 2), (2, 0, 2))
