"""Shards: disjoint, complete, of even length, and the same whenever the seed is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.io import BatchSampler, Dataset, DistributedBatchSampler, IterableDataset

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.sharding import (
    ClusterShard,
    EpochBatchSampler,
    IterableClusterShard,
    shard_dataset,
    with_known_order,
)


class Numbers(Dataset):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return 10 * index


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        yield from range(11)


def contents(shard: Any) -> list[int]:
    if isinstance(shard, IterableDataset):
        return [number for number in shard]  # noqa: C416 (list() would ask for a length)
    return [shard[i] for i in range(len(shard))]


@given(st.integers(7, 200), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_map_style_shards(length: int, clusters: int, seed: int) -> None:
    shards = [shard_dataset(Numbers(length), index, clusters, seed) for index in range(clusters)]
    parts = [contents(shard) for shard in shards]
    assert sorted(number for part in parts for number in part) == [10 * i for i in range(length)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    again = [contents(shard_dataset(Numbers(length), index, clusters, seed)) for index in range(clusters)]
    assert again == parts


def test_too_few_samples_are_refused_on_all_clusters() -> None:
    for index in range(3):
        with pytest.raises(
            ConfigurationError, match="at least one sample for each of 3 clusters to be dealt out, got 2"
        ):
            shard_dataset(Numbers(2), index, 3, 0)


def test_the_seed_decides_and_neighbours_are_parted() -> None:
    first, second = (contents(ClusterShard(Numbers(100), 0, 2, seed)) for seed in (0, 1))
    assert first != second
    assert first != list(range(0, 1000, 20))


def test_lists_can_be_sharded_too() -> None:
    parts = [contents(shard_dataset(list("abcdefg"), index, 2, 0)) for index in range(2)]
    assert sorted(parts[0] + parts[1]) == list("abcdefg")


@pytest.mark.parametrize("clusters", [2, 3, 20])
def test_iterable_shards(clusters: int) -> None:
    shards = [shard_dataset(Stream(), index, clusters, 0) for index in range(clusters)]
    assert all(isinstance(shard, IterableClusterShard) for shard in shards)
    parts = [contents(shard) for shard in shards]
    assert sorted(number for part in parts for number in part) == list(range(11))
    assert contents(shards[1]) == parts[1] == list(range(1, 11, clusters))  # and again, in the stream's order


@pytest.mark.parametrize("dataset", [Numbers(5), Stream()])
def test_one_cluster_keeps_its_dataset(dataset: Any) -> None:
    assert shard_dataset(dataset, 0, 1, 0) is dataset


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_that_of_the_seed_and_the_epoch(drop_last: bool) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        theirs = BatchSampler(Numbers(10), shuffle=True, batch_size=4, drop_last=drop_last)
        sampler = with_known_order(theirs, Numbers(10), seed)
        assert isinstance(sampler, EpochBatchSampler)
        assert len(sampler) == len(theirs)
        sampler.set_epoch(epoch)
        return list(sampler)

    batches = order(-7, 0)
    assert [len(batch) for batch in batches] == ([4, 4] if drop_last else [4, 4, 2])
    assert len({index for batch in batches for index in batch}) == (8 if drop_last else 10)
    assert order(-7, 0) == batches
    assert order(-7, 1) != batches != order(7, 0)


def test_samplers_of_another_sort_stay() -> None:
    others = [
        None,
        BatchSampler(Numbers(4), batch_size=2),
        DistributedBatchSampler(Numbers(4), 2, num_replicas=2, rank=0, shuffle=True),
    ]
    for sampler in others:
        assert with_known_order(sampler, Numbers(4), 0) is sampler
