"""The Trainer of a recipe: one that trains with the other clusters, or on this cluster's part of the data alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["make_trainer"]


def make_trainer(kind: type, nebula: NebulaArguments, alone: bool, train_dataset: Any, **common: Any) -> Any:
    """A PaddleNLP Trainer that is ready to train.

    Args:
        kind: its class, ``Trainer`` or one derived from it.
        nebula: this cluster and the others.
        alone: train on this cluster's part of the data only, without any link, for comparison.
        train_dataset: the whole of it, the same on all clusters; None if nothing is to be trained.
        common: whatever else the class takes, ``args`` among it.
    """
    if alone:
        from paddlenlp_nebula.recipe.solo import SoloReport
        from paddlenlp_nebula.sharding import shard_dataset

        if train_dataset is not None:
            clusters, seed = len(nebula.cluster_names), common["args"].seed
            train_dataset = shard_dataset(train_dataset, nebula.cluster_index, clusters, seed)
        return kind(train_dataset=train_dataset, callbacks=[SoloReport(nebula.cluster_name)], **common)
    from paddlenlp_nebula.trainer import NebulaTrainerMixin

    joined = type(f"Nebula{kind.__name__}", (NebulaTrainerMixin, kind), {})
    return joined(train_dataset=train_dataset, nebula_args=nebula, **common)
