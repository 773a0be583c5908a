"""From what arrived to what losses take: arrays on the host to tensors on the student's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import paddle

from paddlenlp_nebula.distill.knowledge.knowledge import Knowledge
from paddlenlp_nebula.distill.knowledge.soft_labels import LogitsTopK
from paddlenlp_nebula.distill.losses.divergence import SoftLabels
from paddlenlp_nebula.tensors import Tensor

__all__ = ["targets"]


def targets(
    arrays: Mapping[str, npt.NDArray[Any]], kinds: Sequence[Knowledge], place: Any = None
) -> dict[str, Tensor | SoftLabels]:
    """An answer's arrays by the names that `losses.objective.Objective` knows.

    Args:
        arrays: of `messages.Answer.arrays`.
        kinds: of knowledge, the same.
        place: the device; Paddle's current one if None.

    Returns:
        ``logits`` as soft labels; every other array as a tensor by its own name, integers as int64.
    """
    found: dict[str, Tensor | SoftLabels] = {}
    for kind in kinds:
        tensors = [_tensor(arrays[name], place) for name in kind.names()]
        if isinstance(kind, LogitsTopK):
            ids, log_probabilities, log_tail = tensors
            found["logits"] = SoftLabels(ids, log_probabilities, log_tail, kind.tau)
        else:
            found |= dict(zip(kind.names(), tensors, strict=True))
    return found


def _tensor(array: npt.NDArray[Any], place: Any) -> Tensor:
    if array.dtype.kind == "i":
        array = array.astype("int64")  # here, as it is for indices there
    return paddle.to_tensor(array, place=place)
