"""Buckets: contiguous, complete, and what they hold is what the parameters hold."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.buckets import BUCKET_NUMEL, cut, digests, gather
from paddlenlp_nebula.link.frames import HEADER_BYTES
from paddlenlp_nebula.selection import Selection, select
from paddlenlp_nebula.transport.channel import CHUNK_BYTES

from .models import Tied


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
    gathered = [gather(bucket, selection.parameters.__getitem__) for bucket in buckets]
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


def test_what_is_absent_reads_as_zeros() -> None:
    selection = selection_of([2, 3])
    (bucket,) = cut(selection)
    vector = gather(bucket, lambda index: None if index == 0 else selection.parameters[index])
    np.testing.assert_array_equal(vector, [0, 0, 2, 3, 4])


def test_gathering_copies() -> None:
    selection = selection_of([4])
    vector = gather(cut(selection)[0], selection.parameters.__getitem__)
    vector[:] = -1
    assert selection.parameters[0].sum() == 6


@pytest.mark.parametrize("position", [0, 5, 6, 23])
def test_digests_find_the_bucket_that_changed(position: int) -> None:
    selection = select(Tied(), "trainable")
    buckets = cut(selection, 6)
    before = digests(buckets, selection.parameters.__getitem__)
    assert before == digests(buckets, select(Tied(), "trainable").parameters.__getitem__)
    index = next(i for i in range(3) if position < selection.offsets[i + 1])
    flat = selection.parameters[index].flatten().numpy().copy()
    flat[position - selection.offsets[index]] += 1e-6
    selection.parameters[index].set_value(flat.reshape(selection.parameters[index].shape))
    after = digests(buckets, selection.parameters.__getitem__)
    assert [number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        position // 6
    ]
