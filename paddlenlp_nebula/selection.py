"""Which parameters travel: a fixed list in a fixed order, with a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
import paddle
import xxhash
from paddle import nn

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.tensors import Tensor, hash_into, numel

__all__ = ["Selection", "frozen_digest", "running_statistics", "select"]

_DTYPES = (paddle.float32, paddle.bfloat16, paddle.float16)  # what float32, in which all is reduced, can hold


class Selection:
    """The parameters that travel.

    Args:
        parameters: (structured name, parameter), each parameter once, in the model's order.

    Attributes:
        names, parameters: as given.
        offsets: start of each parameter in the flat vector of all elements, and its end last.
        numel: elements in all.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        sizes = [numel(parameter) for parameter in self.parameters]
        self.offsets = [0, *(int(end) for end in np.cumsum(sizes, dtype=np.int64))]
        self.numel = self.offsets[-1]

    def __len__(self) -> int:
        return len(self.parameters)

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes and order, the same on every machine."""
        description = "\n".join(
            f"{name} {list(p.shape)} {str(p.dtype).rpartition('.')[2]}"
            for name, p in zip(self.names, self.parameters, strict=True)
        )
        return f"{len(self)} parameters, {self.numel} elements, {hashlib.sha256(description.encode()).hexdigest()[:16]}"


def select(model: Tensor, which: str) -> Selection:
    """The selection that ``sync_parameters=which`` means for a model.

    Args:
        model: the model as the Trainer holds it, unwrapped. Tied weights count once.
        which: "all", "trainable" or "adapters".

    Raises:
        ConfigurationError: nothing would travel, or ``adapters`` does not fit the model.
    """
    if which == "adapters":
        from paddlenlp_nebula.adapters.select import adapter_parameters

        parameters = adapter_parameters(model)
    else:
        wanted = [(name, p) for name, p in model.named_parameters() if which == "all" or not p.stop_gradient]
        local = running_statistics(model)
        parameters = [(name, p) for name, p in wanted if id(p) not in local]
    if not parameters:
        raise ConfigurationError(
            [f"sync_parameters={which!r} selects no parameter of {type(model).__name__}: is everything frozen?"]
        )
    if others := [f"{name} ({str(p.dtype).rpartition('.')[2]})" for name, p in parameters if p.dtype not in _DTYPES]:
        raise ConfigurationError(
            [f"parameters that travel must be float32, bfloat16 or float16, got {', '.join(others[:3])}: cast them"]
        )
    return Selection(parameters)


def running_statistics(model: Tensor) -> dict[int, str]:
    """id -> name of the parameters that a forward pass changes: the means and variances of BatchNorm layers."""
    kinds = (nn.BatchNorm, nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D, nn.SyncBatchNorm)
    layers = [(name, layer) for name, layer in model.named_sublayers(include_self=True) if isinstance(layer, kinds)]
    return {
        id(getattr(layer, field)): f"{name}.{field}".removeprefix(".")
        for name, layer in layers
        for field in ("_mean", "_variance")
    }


def frozen_digest(
    model: Tensor,
    travelling: Sequence[Tensor],
    on_tensor: Callable[[], None] = lambda: None,
    without: Collection[int] = (),
) -> str:
    """A hash of everything in the model that does not travel: other parameters and buffers.

    Args:
        model: the model as the Trainer holds it, unwrapped.
        travelling: the parameters that do travel.
        on_tensor: called before each tensor: hashing a large model takes many seconds.
        without: ids of tensors to leave out.
    """
    ids = {id(parameter) for parameter in travelling}
    digest = xxhash.xxh3_128()
    state = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in state:
        on_tensor()
        if id(tensor) not in ids and id(tensor) not in without:
            hash_into(digest, name, tensor)
    return digest.hexdigest()
