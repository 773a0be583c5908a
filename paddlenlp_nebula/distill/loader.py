"""A data loader whose batches the teachers have been asked about, some batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from paddle.io import DataLoader

from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays
from paddlenlp_nebula.distill.offer import Inputs
from paddlenlp_nebula.errors import NebulaError

__all__ = ["AccompaniedLoader"]


class AccompaniedLoader(DataLoader):
    """Another loader's batches, in its order; still a DataLoader, whose sampler the Trainer sets to each epoch.

    Args:
        loader: the batches, mappings from names to arrays or tensors.
        client: asks about them.
        names: of the inputs that the teachers take.
        start: called when an epoch begins; how many batches were before it in the data, and how many of its first ones the
            Trainer only skips, because they were trained on before it was resumed: nobody is asked about those.

    Attributes:
        inputs: what was asked about the batch that has been given out last, or None if it was to be skipped.
        answers: teacher -> what it said about that batch.
    """

    def __init__(
        self, loader: DataLoader, client: Client, names: tuple[str, ...], start: Callable[[], tuple[int, int]]
    ) -> None:
        # Not the parent's own: everything it has set up in the other one serves here, too.
        self.__dict__.update(vars(loader))
        self._client = client
        self._names = names
        self._start = start
        self.inputs: Inputs | None = None
        self.answers: dict[str, Arrays | None] = {}

    def __iter__(self) -> Iterator[Any]:
        position, skipped = self._start()
        batches = iter(super().__iter__())
        for batch in islice(batches, skipped):
            self.inputs, self.answers = None, {}
            yield batch
        pairs = ((batch, self._inputs_of(batch)) for batch in batches)
        for (batch, inputs), answers in self._client.accompany(pairs, lambda pair: pair[1], position + skipped):
            self.inputs, self.answers = inputs, answers
            yield batch

    def _inputs_of(self, batch: Mapping[str, Any]) -> Inputs:
        missing = [name for name in self._names if name not in batch]
        if missing:
            raise NebulaError(
                f"a batch must have {', '.join(self._names)} (distill_inputs), got {', '.join(batch)}: set distill_inputs to "
                "what the teacher's model takes of it"
            )
        return {name: np.asarray(batch[name]).astype(np.int64) for name in self._names}
