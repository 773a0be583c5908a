"""Local steps whose LoRA pairs are merged by their products, at ranks that may differ between the clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_nebula.adapters.layout import Description, compare, describe
from paddlenlp_nebula.adapters.lora import lora_pairs
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.rounds.local_steps import LocalStepsRounds
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.initial import spread_parameters
from paddlenlp_nebula.strategy.product import ProductMerge
from paddlenlp_nebula.tensors import Tensor

__all__ = ["LoraProductRounds"]


@dataclass(frozen=True)
class _Widened:
    """A factor as it travels: of the largest rank, the rest zeros."""

    shape: list[int]
    dtype: Any
    place: Any


class LoraProductRounds(LocalStepsRounds):
    """`LocalStepsRounds` with ``sync_lora_merge="product"``.

    Every cluster sends what has become of its own A and B, filled up with zeros to the largest rank among
    the clusters, so that one cut into buckets and one codec serve all. Merging takes what all clusters have sent, and
    an SVD on the host, so there is nothing to be gained by keeping vectors anywhere else.

    Raises:
        ConfigurationError: the adapter is no plain LoRA, or the clusters' layers differ.
    """

    only_host = "sync_lora_merge='product' factors the products on the host"

    def __init__(self, run: Run, selection: Selection, optimizer: Any, max_steps: int, model: Tensor) -> None:
        notes = run.notes({"lora": describe(lora_pairs(model))})
        self._descriptions: dict[str, Description] = {name: note["lora"] for name, note in notes.items()}
        if problems := compare(self._descriptions):
            raise ConfigurationError(problems)
        super().__init__(run, _widened(selection, self._descriptions), optimizer, max_steps)
        self._parameters = selection.parameters

    def _product(self) -> ProductMerge:
        return ProductMerge(self._selection, self._descriptions)

    def _make_equal(self) -> None:
        """Tell everybody what everybody starts from: the first cluster's parameters, where ranks allow it."""
        values: Float32Vector = np.empty(self._selection.numel, dtype=np.float32)

        def work() -> None:
            vectors = {}
            for member in self._arguments.cluster_names:
                spread_parameters(self.exchange, member, values)
                vectors[member] = values.copy()
            values[:] = self._leader.begin(vectors)

        self._run.local.lead(work)
        self._write(values)

    def _source(self, index: int) -> Tensor:
        tensor = super()._source(index)
        for axis, size in enumerate(self._selection.parameters[index].shape):
            if size > tensor.shape[axis]:
                zeros = list(tensor.shape)
                zeros[axis] = size - tensor.shape[axis]
                tensor = paddle.concat([tensor.detach(), paddle.zeros(zeros, dtype=tensor.dtype)], axis=axis)
        return tensor

    def _put(self, index: int, values: Float32Vector) -> None:
        wide = values.reshape(self._selection.parameters[index].shape)
        own = tuple(slice(size) for size in self._parameters[index].shape)
        super()._put(index, np.ascontiguousarray(wide[own]).reshape(-1))


def _widened(selection: Selection, descriptions: dict[str, Description]) -> Selection:
    ranks: dict[str, int] = {}
    for description in descriptions.values():
        for layer, shape in description.items():
            ranks[layer] = max(ranks.get(layer, 0), shape["rank"])
    parameters = []
    for name, parameter in zip(selection.names, selection.parameters, strict=True):
        layer, _, kind = name.rpartition(".")
        if layer in ranks and kind in ("lora_A", "lora_B"):
            rows, columns = parameter.shape
            wide = [rows, ranks[layer]] if kind == "lora_A" else [ranks[layer], columns]
            parameters.append((name, _Widened(wide, parameter.dtype, parameter.place)))
        else:
            parameters.append((name, parameter))
    return Selection(parameters)
