"""Evaluations during training: what the clusters can agree on if each has gone its own way since the last round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.tensors import numel

__all__ = ["comparable", "forget_best", "refuse_what_cannot_agree", "why_not_again"]

_LOCAL_METRICS = ("runtime", "samples_per_second", "steps_per_second", "epoch", "ppl_runtime")


def refuse_what_cannot_agree(args: Any, nebula: NebulaArguments) -> None:
    """Refuse evaluations and best models that would not be the same on all clusters of ``local_steps``.

    Metrics are averaged over clusters that are at the same step, and a best model is one only if all clusters hold
    the same parameters when it is saved: after a round.

    Args:
        args: PaddleNLP's TrainingArguments.
        nebula: our own settings.

    Raises:
        ConfigurationError: with every problem.
    """
    evaluation, saving = (getattr(kind, "value", kind) for kind in (args.evaluation_strategy, args.save_strategy))
    if nebula.sync_strategy != "local_steps" or len(nebula.cluster_names) == 1 or evaluation == "no":
        return
    pace = nebula.pace
    problems = []
    if pace.balance:
        problems.append(
            f"evaluation_strategy must be 'no' with sync_every={nebula.sync_every!r}, got {evaluation!r}: clusters at "
            "different steps cannot agree on metrics, so evaluate after training, or set a number of steps"
        )
    elif args.load_best_model_at_end:
        why = (
            "with load_best_model_at_end, or the clusters would hold different parameters when the best model is saved"
        )
        if pace.first != pace.last:
            problems.append(f"sync_every must be a fixed number of steps, got {nebula.sync_every!r}, {why}")
        elif saving != "steps":
            problems.append(f"save_strategy must be 'steps', a multiple of sync_every, got {saving!r}, {why}")
        elif args.save_steps % pace.last:
            problems.append(f"save_steps must be a multiple of sync_every ({pace.last}), got {args.save_steps}, {why}")
        if nebula.sync_fragments > 1:
            problems.append(f"sync_fragments must be 1, got {nebula.sync_fragments}, {why}")
        if nebula.sync_keep_unsent:
            problems.append(f"sync_keep_unsent must be false {why}")
    if problems:
        raise ConfigurationError(problems)


def why_not_again(evaluation: str) -> str | None:
    """Why clusters that have been apart could not agree on metrics any more; None if they could.

    Args:
        evaluation: when this cluster evaluates, as `hello` says it.
    """
    if "epoch" not in evaluation:
        return None
    return (
        "with evaluation_strategy='epoch' one that comes back would evaluate at other steps than the rest: use 'steps'"
    )


def forget_best(state: Any) -> str | None:
    """The clusters come together: each begins anew to look for the best model, or they would load unlike ones.

    Args:
        state: the TrainerState.

    Returns:
        What was forgotten, in a sentence; None if there was nothing.
    """
    best, state.best_model_checkpoint, state.best_metric = state.best_model_checkpoint, None, None
    if best is None:
        return None
    return f"{best} is no longer the best model: clusters that were apart have evaluated unlike ones, and look anew"


def comparable(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation that clusters can average: single numbers that do not tell of this machine alone."""
    return {
        key: number
        for key, value in metrics.items()
        if not key.endswith(_LOCAL_METRICS) and (number := _number(value)) is not None
    }


def _number(value: Any) -> float | None:
    """A metric as a number (also NumPy's and Paddle's), or None if it is not a single one."""
    if hasattr(value, "item") and numel(value) == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None
