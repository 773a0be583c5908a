"""From a teacher's outputs to what it tells, on its device: only the small result is copied from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Knowledge
from paddlenlp_nebula.distill.knowledge.soft_labels import LogitsTopK
from paddlenlp_nebula.distill.knowledge.tokens import Labels
from paddlenlp_nebula.distill.knowledge.vectors import Hidden, Vectors
from paddlenlp_nebula.distill.losses.divergence import outcomes
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.precision import full_precision
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["basis", "most_probable", "soft_labels", "tell", "vectors"]


def tell(kinds: Sequence[Knowledge], outputs: Mapping[str, Any], places: Places) -> Arrays:
    """All that is asked for, as arrays to encode.

    Args:
        kinds: of knowledge.
        outputs: the teacher's: ``logits``, cut to the shared vocabulary, shape (samples, length, V); layers' outputs by
            name (``hidden.3``, ``q.6``); ``sequence`` and ``lengths`` as arrays.
        places: which positions count.

    Raises:
        NebulaError: an output is missing or not finite.
    """
    arrays: Arrays = {}
    for kind in kinds:
        needed = ("logits",) if isinstance(kind, LogitsTopK | Labels) else kind.names()
        missing = [name for name in needed if name not in outputs]
        if missing:
            raise NebulaError(
                f"{kind.spec} needs the teacher's {', '.join(missing)}, got {', '.join(outputs)}: does this model have "
                "such a layer?"
            )
        if isinstance(kind, LogitsTopK):
            arrays |= soft_labels(outputs["logits"], places, kind.kept, kind.tau)
        elif isinstance(kind, Labels):
            arrays |= most_probable(outputs["logits"], places)
        elif isinstance(kind, Vectors):
            rank = kind.rank if isinstance(kind, Hidden) else 0
            arrays |= vectors({name: outputs[name] for name in needed}, places, rank)
        else:
            arrays |= {name: outputs[name] for name in needed}
    return arrays


@paddle.no_grad()  # type: ignore[untyped-decorator]
@full_precision
def soft_labels(logits: Tensor, places: Places, kept: int, tau: float) -> Arrays:
    """The most probable tokens of each position, and the mass of all others: the arrays of `LogitsTopK`.

    Args:
        logits: any floating dtype, shape (samples, length, V), cut to the shared vocabulary.
        places: which positions count.
        kept: K; V if that is less.
        tau: temperature.

    Raises:
        NebulaError: a logit is not finite; it names sample and position.
    """
    rows = places.rows(logits).astype("float32")
    places.check_finite(rows, "logits")
    kept = min(kept, rows.shape[-1])
    if places.count == 0:
        return _arrays(np.zeros((0, kept)), np.zeros((0, kept)), np.zeros(0))
    scores = rows / tau
    ids = paddle.topk(scores, kept, axis=-1)[1]
    told = outcomes(scores, ids).numpy()
    return _arrays(ids.numpy(), told[:, :-1], told[:, -1])


def _arrays(ids: npt.NDArray[Any], values: npt.NDArray[Any], tail: npt.NDArray[Any]) -> Arrays:
    return {
        "ids": ids.astype(np.int32),
        "log_probabilities": values.astype(np.float32),
        "log_tail": tail.astype(np.float32),
    }


@paddle.no_grad()  # type: ignore[untyped-decorator]
@full_precision
def most_probable(logits: Tensor, places: Places) -> Arrays:
    """The most probable token or class of each position: the array of `Labels`.

    Arguments and errors as for `soft_labels`.
    """
    rows = places.rows(logits).astype("float32")
    places.check_finite(rows, "logits")
    return {"labels": rows.argmax(axis=-1).numpy().astype(np.int32)}


@paddle.no_grad()  # type: ignore[untyped-decorator]
@full_precision
def vectors(outputs: dict[str, Tensor], places: Places, rank: int = 0) -> Arrays:
    """Layers' outputs as rows: the arrays of `Hidden` or `AttentionRelations`.

    Args:
        outputs: name -> tensor, any floating dtype, shape (samples, length, width).
        places: which positions count.
        rank: R of ``lowrank``; 0 for the whole width.

    Returns:
        Name -> float32, shape (rows, width or R).

    Raises:
        NebulaError: a number is not finite; it names output, sample and position.
    """
    arrays: Arrays = {}
    for name, output in outputs.items():
        rows = places.rows(output).astype("float32")
        places.check_finite(rows, name)
        if 0 < rank < rows.shape[-1]:
            rows = F.linear(rows, paddle.to_tensor(basis(rows.shape[-1], rank), place=rows.place))
        arrays[name] = rows.numpy()
    return arrays


@lru_cache(maxsize=8)
def basis(width: int, rank: int) -> npt.NDArray[np.float32]:
    """A fixed random basis to project on, float32, shape (width, rank).

    Orthogonal columns of length sqrt(width / rank), so that the squared length of a projected vector is in the mean
    that of the vector (Johnson and Lindenstrauss 1984; the numbers are our choice). It is the teacher's alone, the same
    in every run, so that cached answers stay valid.
    """
    draw = np.random.default_rng([width, rank]).standard_normal((width, rank))
    columns, _ = np.linalg.qr(draw)
    scaled: npt.NDArray[np.float32] = (columns * np.sqrt(width / rank)).astype(np.float32)
    return scaled
