"""What a batch is made of, whatever form a Trainer gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import numel

__all__ = ["count", "hash_batch"]


def count(inputs: Any, *, weighs_tokens: bool = False) -> tuple[int, int]:
    """How much there is in a batch.

    Args:
        inputs: as the Trainer gives it to the model: tensors by name, a list of them, or one.
        weighs_tokens: whether clusters are weighted by their tokens.

    Returns:
        Samples, the length of the first tensor, and tokens: what a two-dimensional ``attention_mask`` leaves of them, or
        else the elements of ``input_ids``; 0 if the batch has neither.

    Raises:
        NebulaError: it has neither, and tokens are what weighs.
    """
    inputs = _named(inputs)
    tensors = [value for value in inputs.values() if hasattr(value, "shape") and len(value.shape) > 0]
    samples = int(tensors[0].shape[0]) if tensors else 0
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if mask is not None and len(mask.shape) == 2:
        return samples, int(mask.astype("int64").sum())
    if ids is None and weighs_tokens:
        raise NebulaError(
            "sync_weight='tokens' needs batches with input_ids or a two-dimensional attention_mask, got one with "
            f"{', '.join(map(str, inputs)) or 'nothing'}: set sync_weight='samples'"
        )
    return samples, numel(ids) if ids is not None else 0


def hash_batch(inputs: Any) -> int:
    """A hash of a batch's content, never 0."""
    digest = xxhash.xxh3_64()
    inputs = _named(inputs)
    for key in sorted(inputs):
        value = inputs[key]
        if hasattr(value, "numpy"):
            array = value.astype("float32").numpy() if "bfloat16" in str(value.dtype) else value.numpy()
            digest.update(f"{key} {array.shape}".encode() + array.tobytes())
    return digest.intdigest() or 1


def _named(inputs: Any) -> Mapping[str, Any]:
    """A batch's parts by name; a Trainer with a ``compute_loss`` of its own may have a list or a single tensor."""
    if isinstance(inputs, Mapping):
        return inputs
    parts = inputs if isinstance(inputs, list | tuple) else [inputs]
    return {f"{number:06d}": part for number, part in enumerate(parts)}
