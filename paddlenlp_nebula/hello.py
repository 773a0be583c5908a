"""What must be equal on all clusters when training begins, and what must not be."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import xxhash
from paddlenlp.trainer.trainer_utils import has_length

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.hybrid import owners
from paddlenlp_nebula.tensors import Tensor, hash_into

__all__ = ["hello", "optimizer_digest", "part_random_state"]

# Fields of TrainingArguments that decide about a step or about which model is the best.
_EQUAL = (
    *("learning_rate", "warmup_steps", "warmup_ratio", "decay_steps", "num_cycles", "lr_end", "power"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "skip_data_intervals"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
)
# Ours, under any strategy, and those that act under local_steps only.
_EQUAL_SYNC: tuple[str, ...] = (
    "sync_strategy",
    "sync_codec",
    "sync_error_feedback",
    "sync_feedback_decay",
    "sync_parameters",
)
_EQUAL_SYNC += ("sync_lora_merge", "sync_weight", "sync_init")
_EQUAL_SYNC += ("privacy_clip_norm", "privacy_noise_multiplier", "privacy_delta", "privacy_secure_aggregation")
_EQUAL_LOCAL_STEPS: tuple[str, ...] = (
    "sync_every",
    "sync_outer",
    "sync_outer_lr",
    "sync_outer_momentum",
    "sync_fragments",
)
_EQUAL_LOCAL_STEPS += ("sync_keep_unsent", "sync_final_codec")


def hello(args: Any, state: Any, nebula: NebulaArguments, loader: Any, scheduler: Any) -> dict[str, Any]:
    """What must be equal on all clusters, as far as it takes no time to find out; see `handshake.compare`.

    Args:
        args: PaddleNLP's TrainingArguments.
        state: the TrainerState.
        nebula: our own settings.
        loader, scheduler: as the Trainer's callbacks get them.
    """
    local_steps = nebula.sync_strategy == "local_steps"
    # With local steps the optimizer's and the scheduler's state is each cluster's own.
    resumed = state.global_step > 0 and scheduler is not None and not local_steps
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    if precision != "fp32":
        precision += f" {args.fp16_opt_level}" + (" amp_master_grad" if args.amp_master_grad else "")
    return {
        **{name: getattr(nebula, name) for name in _EQUAL_SYNC},
        **({name: getattr(nebula, name) for name in _EQUAL_LOCAL_STEPS} if local_steps else {}),
        "max_steps": state.max_steps,
        # Balanced clusters are at steps of their own; their rounds are compared.
        "global_step": None if local_steps and nebula.pace.balance else state.global_step,
        "precision": precision,
        "optim": getattr(args.optim, "value", args.optim),
        "lr_scheduler_type": getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
        **{name: getattr(args, name, None) for name in _EQUAL},
        "lr_scheduler_state": json.dumps(scheduler.state_dict(), sort_keys=True, default=str) if resumed else None,
        "evaluation": _evaluation(args, loader),
        "unique:output_dir": f"{_machine()}:{os.path.realpath(args.output_dir)}",
    }


def optimizer_digest(model: Tensor, optimizer: Any, on_tensor: Callable[[], None] = lambda: None) -> str | None:
    """A hash of a resumed optimizer's moments and master weights, the same on every machine.

    Args:
        model: the model as the Trainer holds it, unwrapped.
        optimizer: as the Trainer's callbacks get it, wrapped.
        on_tensor: called before each tensor: hashing the state of a large model takes many seconds.

    Returns:
        None under sharding stage 1: each process holds the part of its own parameters, and which these are depends on
        the number of processes. A difference then shows after the first step, in the parameters' digests.
    """
    if owners(optimizer) is not None:
        return None
    state = dict(optimizer.state_dict())
    state.pop("LR_Scheduler", None)
    state |= {f"{key}_master_weight": tensor for key, tensor in state.pop("master_weights", {}).items()}
    # Paddle names them after parameters, and those after a counter of layers in the process: linear_0.w_0_moment1_0.
    names = {f"{parameter.name}_": name for name, parameter in model.named_parameters()}
    named = {}
    for key, tensor in state.items():
        prefix = max((prefix for prefix in names if key.startswith(prefix)), key=len, default="")
        named[names.get(prefix, ""), key.removeprefix(prefix)] = tensor
    digest = xxhash.xxh3_128()
    for name, kind in sorted(named):
        on_tensor()
        hash_into(digest, f"{name} {kind}", named[name, kind])
    return digest.hexdigest()


def _evaluation(args: Any, loader: Any) -> str:
    """When evaluations take place: all clusters must agree on their metrics at the same steps."""
    strategy = str(getattr(args.evaluation_strategy, "value", args.evaluation_strategy))
    if strategy == "steps":
        return f"every {args.eval_steps} steps"
    if strategy == "epoch" and loader is not None and has_length(loader):
        return f"every epoch of {max(1, len(loader) // args.gradient_accumulation_steps)} steps"
    return strategy


def _machine() -> str:
    """This machine's name, and what tells it from another of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} ({boot.read_text().strip()[:8] if boot.is_file() else 'no boot id'})"


def part_random_state(cluster_index: int) -> None:
    """Let each cluster draw its own random numbers from here on; the first one draws what it would without us.

    Trainers of one seed would drop out the same units of different samples, which one job on all of them does not.
    """
    if cluster_index > 0:
        paddle.seed(paddle.framework.core.default_cpu_generator().initial_seed() + cluster_index)
