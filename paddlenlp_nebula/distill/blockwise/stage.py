"""Training all pairs of blocks: one after another in one process, or in stages that relay the teacher's activation.

Pipe-BD (arXiv 2301.12443, abstract): block-wise distillation used to run the teacher from its beginning for each block
under training (`recomputing`); a pipeline does away with these redundant runs. Here each stage passes the teacher's
activation at its end on, so that every teacher block runs once per batch, as in `sequential`, and all three give the
same losses, to the bit if blocks draw no random numbers (dropout) and activations travel as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.distill.blockwise.pair import Pair
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Activation", "recomputing", "run_stage", "sequential"]


@dataclass(frozen=True, eq=False)
class Activation:
    """What goes into a stage for one batch.

    Attributes:
        number: of the batch.
        mask: positions that count, bool, shape (samples, length). What the others hold changes no loss: it need not
            travel.
        values: the teacher's hidden states, float32, shape (samples, length, width); for the first stage the token ids,
            int64, shape (samples, length).
    """

    number: int
    mask: npt.NDArray[np.bool_]
    values: npt.NDArray[Any]

    @cached_property
    def places(self) -> Places:
        """The positions that count."""
        return Places(self.mask, f"batch {self.number}")

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Values and mask on Paddle's current device."""
        return paddle.to_tensor(self.values), paddle.to_tensor(self.mask)


def sequential(pairs: Sequence[Pair], batches: Iterable[Activation]) -> Iterator[list[float]]:
    """The reference: all pairs in one process, block by block.

    Args:
        pairs: of the whole model.
        batches: token ids.

    Yields:
        For each batch the loss of each pair.
    """
    for batch in batches:
        (state, mask), losses = batch.tensors(), []
        for pair in pairs:
            target = pair.teach(state, mask)
            losses.append(pair.learn(state, target, mask, batch.places))
            state = target
        yield losses


def run_stage(
    pairs: Sequence[Pair], arriving: Iterable[Activation], relay: Callable[[Activation], None] | None
) -> Iterator[list[float]]:
    """A stage of the pipeline: the teacher's blocks first, so that the next stage can begin while this one learns.

    Args:
        pairs: of this stage, consecutive.
        arriving: from the stage before; token ids for the first stage. Waiting is its business, and so is where an
            activation comes from: a queue, or a link.
        relay: takes what the next stage gets; it should return at once. None for the last stage.

    Yields:
        For each batch the loss of each pair.
    """
    for batch in arriving:
        state, mask = batch.tensors()
        states = [state]
        for pair in pairs:
            states.append(pair.teach(states[-1], mask))
        if relay is not None:
            batch.places.check_finite(batch.places.rows(states[-1]), "activation")
            relay(Activation(batch.number, batch.mask, states[-1].astype("float32").numpy()))
        yield [
            pair.learn(before, after, mask, batch.places)
            for pair, before, after in zip(pairs, states, states[1:], strict=False)
        ]


def recomputing(pairs: Sequence[Pair], batches: Iterable[Activation]) -> Iterator[list[float]]:
    """What Pipe-BD is compared with: for each block the teacher runs from its beginning.

    Several processes share a batch: each has all pairs, made with ``average``, and its own samples. Of N blocks, a batch
    runs N (N + 1) / 2 instead of N of the teacher's.

    Arguments and result as for `sequential`; losses are those of the own samples.
    """
    for batch in batches:
        (ids, mask), losses = batch.tensors(), []
        for index, pair in enumerate(pairs):
            state = ids
            for earlier in pairs[:index]:
                state = earlier.teach(state, mask)
            losses.append(pair.learn(state, pair.teach(state, mask), mask, batch.places))
        yield losses
