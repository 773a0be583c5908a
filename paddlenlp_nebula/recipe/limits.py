"""What PaddleNLP's TrainingArguments accept without a word and then fail on, minutes into a run, or ignore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["training_problem"]

_Limit = tuple[str, Callable[[Any], bool]]

_COUNT: _Limit = ("at least 1", lambda value: value >= 1)
_COUNT_OR_UNSET: _Limit = ("at least 1, or -1 for 'not set'", lambda value: value == -1 or value >= 1)
_NOT_NEGATIVE: _Limit = ("0 or more", lambda value: value >= 0)
_POSITIVE: _Limit = ("more than 0", lambda value: value > 0)
_SHARE: _Limit = ("between 0 and 1", lambda value: 0 <= value <= 1)
_DECAY: _Limit = ("at least 0 and less than 1", lambda value: 0 <= value < 1)

_LIMITS: dict[str, _Limit] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_train_epochs": _POSITIVE,
    "max_steps": _COUNT_OR_UNSET,
    "max_evaluate_steps": _COUNT_OR_UNSET,
    "learning_rate": _NOT_NEGATIVE,
    "lr_end": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_epsilon": _POSITIVE,
    "warmup_ratio": _SHARE,
    "warmup_steps": _NOT_NEGATIVE,
    "logging_steps": _COUNT,
    "eval_steps": _COUNT,
    "save_steps": _COUNT,
    "save_total_limit": _COUNT,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "seed": ("between 0 and 4294967295", lambda value: 0 <= value < 2**32),
}


def training_problem(name: str, value: Any) -> str | None:
    """What a TrainingArguments field must be, if ``value`` (already of the right type) is not that."""
    if name in _LIMITS:
        expected, fits = _LIMITS[name]
        return None if fits(value) else expected
    choices = _choices().get(name)
    if choices is not None and value not in choices:
        return " or ".join(map(repr, choices))
    return _unsupported(name, value)


def _unsupported(name: str, value: Any) -> str | None:
    """Of what `refuse_unsupported` refuses, what is written in a recipe: with one process PaddleNLP just forgets it."""
    from paddlenlp_nebula.hybrid import SPLIT_MODELS

    yet = "inside a cluster is not supported across clusters yet"
    if name in SPLIT_MODELS and value > 1:
        return f"1 ({SPLIT_MODELS[name]} {yet})"
    if name == "use_expert_parallel" and value:
        return f"false (expert parallelism {yet})"
    if name == "sharding" and not set(value.split()) <= {"stage1"}:
        return f"stage1 or not set (any other {yet})"
    return None


def _choices() -> dict[str, list[str]]:
    """Fields that PaddleNLP declares as text although they name a choice."""
    from paddlenlp.trainer.trainer_utils import OptimizerNames, SchedulerType

    return {
        "lr_scheduler_type": [member.value for member in SchedulerType],
        "optim": [member.value for member in OptimizerNames],
        "fp16_opt_level": ["O1", "O2"],
    }
