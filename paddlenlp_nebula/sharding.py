"""Each cluster's own part of a dataset: seeded, disjoint and complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from paddle.io import Dataset, IterableDataset

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["ClusterShard", "IterableClusterShard", "shard_dataset"]


class ClusterShard(Dataset):
    """One cluster's part of a map-style dataset.

    Args:
        dataset: the whole dataset, the same on every cluster.
        cluster_index: which part, from 0.
        clusters: how many parts; their lengths differ by one at most.
        seed: decides which sample belongs to whom.

    Raises:
        ConfigurationError: there are fewer samples than clusters.

    Attributes:
        whole: samples in the whole dataset.
        indices: those of this part, in the order in which they are numbered here.
    """

    def __init__(self, dataset: Any, cluster_index: int, clusters: int, seed: int) -> None:
        super().__init__()
        self._dataset = dataset
        self.whole = len(dataset)
        if self.whole < clusters:
            raise ConfigurationError(
                [
                    f"the training dataset must have at least one sample for each of {clusters} clusters to be dealt out, "
                    f"got {self.whole}: give them more data, or each its own (sync_data='own')"
                ]
            )
        order = np.random.RandomState(seed).permutation(self.whole)
        self.indices = order[cluster_index::clusters]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self.indices[index])]


class IterableClusterShard(IterableDataset):
    """Every ``clusters``-th sample of an iterable dataset, from the ``cluster_index``-th on."""

    def __init__(self, dataset: Any, cluster_index: int, clusters: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._cluster_index = cluster_index
        self._clusters = clusters

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self._dataset):
            if number % self._clusters == self._cluster_index:
                yield sample


def shard_dataset(dataset: Any, cluster_index: int, clusters: int, seed: int) -> Any:
    """This cluster's part of a map-style or iterable dataset; the dataset itself if there is one cluster.

    Args:
        dataset: the whole dataset, the same on every cluster.
        cluster_index: this cluster's position, 0 <= cluster_index < clusters.
        clusters: number of clusters.
        seed: the same on every cluster (ignored for iterable datasets, which are dealt out in turn).
    """
    if clusters == 1:
        return dataset
    if isinstance(dataset, IterableDataset):
        return IterableClusterShard(dataset, cluster_index, clusters)
    return ClusterShard(dataset, cluster_index, clusters, seed)
