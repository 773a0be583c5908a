"""Chooses the device that a recipe names."""

from __future__ import annotations

from typing import Any

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["refuse_precision", "use_device"]


def use_device(name: str) -> None:
    """Make ``name`` (``cpu``, ``gpu``, ...) Paddle's device.

    Raises:
        ConfigurationError: if this machine's Paddle cannot use it.
    """
    import paddle

    try:
        paddle.set_device(name)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigurationError(
            [f"device must be one that Paddle can use here, got {name!r} ({reason}); without a GPU, set device: cpu"]
        ) from None


def refuse_precision(training: Any) -> None:
    """Say so, rather than Paddle's kernels minutes later, when ``device`` cannot compute in the wanted precision.

    Args:
        training: PaddleNLP's TrainingArguments.

    Raises:
        ConfigurationError: the whole model in half precision (O2) on a CPU.
    """
    if training.device != "cpu" or training.fp16_opt_level != "O2" or not (training.bf16 or training.fp16):
        return
    precision = "bf16" if training.bf16 else "fp16"
    raise ConfigurationError(
        [
            f"{precision} with fp16_opt_level O2 needs a GPU, got device 'cpu', for which Paddle has no such kernels: "
            f"set {precision}: false and fp16_opt_level: O1"
        ]
    )
