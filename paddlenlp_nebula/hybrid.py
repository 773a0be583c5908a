"""Several processes in one cluster: what is supported, and where the complete gradients are."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.local import LocalGroup
from paddlenlp_nebula.tensors import Tensor, gradient, numel, set_gradient, unwrapped

__all__ = ["SPLIT_MODELS", "complete_gradients", "owners", "refuse_unsupported"]

SPLIT_MODELS = {
    "tensor_parallel_degree": "tensor parallelism",
    "pipeline_parallel_degree": "pipeline parallelism",
    "sep_parallel_degree": "sequence (sep) parallelism",
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}
"""Degrees of parallelism that are not supported across clusters yet."""
_HIDDEN_GRADIENTS = ("split_param", "enable_stage1_tensor_fusion", "enable_stage1_overlap", "enable_release_grads")


def refuse_unsupported(args: Any) -> None:
    """Refuse what would exchange wrong gradients.

    Args:
        args: PaddleNLP's TrainingArguments.

    Raises:
        ConfigurationError: with every unsupported setting.
    """
    problems = [
        f"{what} inside a cluster is not supported across clusters yet: {field} must be 1, got {getattr(args, field)}; "
        "use data parallelism or sharding='stage1'"
        for field, what in SPLIT_MODELS.items()
        if getattr(args, field, -1) > 1
    ]
    if getattr(args, "use_expert_parallel", False):
        problems.append(
            "expert parallelism inside a cluster is not supported across clusters yet: unset use_expert_parallel"
        )
    sharding = [getattr(option, "value", option) for option in args.sharding or []] if args.world_size > 1 else []
    for stage in sharding:
        if stage != "stage1":
            problems.append(
                f"sharding={stage!r} inside a cluster is not supported across clusters yet: use sharding='stage1' or "
                "plain data parallelism"
            )
    if "stage1" in sharding:
        for option in _HIDDEN_GRADIENTS:
            if option in str(args.sharding_parallel_config):
                problems.append(
                    f"sharding_parallel_config={option!r} keeps gradients where they cannot be exchanged yet: remove it"
                )
        if args.sharding_parallel_degree not in (-1, args.world_size):
            problems.append(
                f"sharding_parallel_degree must be the number of processes ({args.world_size}) to train across "
                f"clusters, got {args.sharding_parallel_degree}"
            )
        if args.fp16:
            problems.append(
                "fp16 with sharding='stage1' reduces gradients too late to exchange them: use bf16 or data parallelism"
            )
    if problems:
        raise ConfigurationError(problems)


def complete_gradients(optimizer: Any, local: LocalGroup) -> None:
    """Give every local process the cluster's complete gradients.

    Data parallelism has done so already. Under sharding stage 1 only the owner of a parameter
    holds its reduced gradient, so each owner passes its own on.

    Args:
        optimizer: as the Trainer's callbacks get it, wrapped.
        local: this cluster's processes.
    """
    if local.size == 1 or (owned := owners(optimizer)) is None:
        return
    for owner, parameters in sorted(owned.items()):
        for parameter in parameters:
            if gradient(parameter) is None:  # stage 1 has created one on the owner
                set_gradient(parameter, np.zeros(numel(parameter), dtype=np.float32))
            local.broadcast_tensor(gradient(parameter), owner)


def owners(optimizer: Any) -> dict[int, list[Tensor]] | None:
    """rank -> the parameters whose gradients it owns, under sharding stage 1; else None."""
    for layer in unwrapped(optimizer):
        if (owned := vars(layer).get("_rank2params")) is not None:
            return dict(owned)
    return None
