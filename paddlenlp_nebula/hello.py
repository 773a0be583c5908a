"""What must be equal on all clusters when training begins, and what must not be."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import paddle
from paddlenlp.trainer.trainer_utils import has_length

from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["hello", "part_random_state"]

# Fields of TrainingArguments that decide about a step or about which model is the best.
_EQUAL = (
    *("learning_rate", "warmup_steps", "warmup_ratio", "decay_steps", "num_cycles", "lr_end", "power"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "skip_data_intervals"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
)


def hello(args: Any, state: Any, nebula: NebulaArguments, loader: Any) -> dict[str, Any]:
    """The settings that must be equal on all clusters; see `handshake.compare`."""
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    if precision != "fp32":
        precision += f" {args.fp16_opt_level}" + (" amp_master_grad" if args.amp_master_grad else "")
    return {
        "sync_strategy": nebula.sync_strategy,
        "sync_codec": nebula.sync_codec,
        "sync_parameters": nebula.sync_parameters,
        "sync_weight": nebula.sync_weight,
        "sync_init": nebula.sync_init,
        "max_steps": state.max_steps,
        "global_step": state.global_step,
        "precision": precision,
        "optim": getattr(args.optim, "value", args.optim),
        "lr_scheduler_type": getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
        **{name: getattr(args, name, None) for name in _EQUAL},
        "evaluation": _evaluation(args, loader),
        "unique:output_dir": f"{_machine()}:{os.path.abspath(args.output_dir)}",
    }


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
