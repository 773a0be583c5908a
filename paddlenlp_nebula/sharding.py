"""Each cluster's own part of a dataset, seeded, disjoint and complete; and its order, which a resume finds again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from paddle.io import BatchSampler, Dataset, DistributedBatchSampler, IterableDataset, RandomSampler

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["ClusterShard", "EpochBatchSampler", "IterableClusterShard", "shard_dataset", "with_known_order"]


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


class EpochBatchSampler(DistributedBatchSampler):
    """Batches of one process in an order that depends on the seed and on the epoch alone; the Trainer says which epoch it is.

    Args:
        dataset: of known length.
        batch_size: samples.
        drop_last: leave out an incomplete last batch.
        seed: another one shuffles otherwise.
    """

    def __init__(self, dataset: Any, batch_size: int, *, drop_last: bool, seed: int) -> None:
        super().__init__(dataset, batch_size, num_replicas=1, rank=0, shuffle=True, drop_last=drop_last)
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch."""
        super().set_epoch(int(np.random.SeedSequence([self._seed % 2**64, epoch]).generate_state(1)[0]))


def with_known_order(sampler: Any, dataset: Any, seed: int) -> Any:
    """In the place of a sampler that shuffles by NumPy's random state of the moment, which no checkpoint brings back.

    Args:
        sampler: the Trainer's; one of another sort is returned as it is.
        dataset: that it samples.
        seed: of the order.
    """
    if type(sampler) is not BatchSampler or not isinstance(sampler.sampler, RandomSampler):
        return sampler
    return EpochBatchSampler(dataset, sampler.batch_size, drop_last=sampler.drop_last, seed=seed)
