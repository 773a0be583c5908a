"""What may be set for strategies and their codecs, and what goes with what."""

from __future__ import annotations

from typing import Protocol

from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.strategy.pace import Pace

__all__ = ["strategy_problems"]

_LOCAL_STEPS_ONLY = {"sync_outer": "average", "sync_fragments": 1, "sync_keep_unsent": False, "sync_final_codec": None}


class StrategySettings(Protocol):
    """The fields of `NebulaArguments` that matter here."""

    sync_strategy: str
    sync_every: str
    sync_codec: str
    sync_final_codec: str | None
    sync_error_feedback: bool
    sync_feedback_decay: float
    sync_keep_unsent: bool
    sync_outer: str
    sync_outer_lr: float
    sync_outer_momentum: float
    sync_fragments: int
    sync_lora_merge: str
    sync_backend: str


def strategy_problems(settings: StrategySettings) -> list[str]:
    """One sentence for each thing about strategies and codecs that is wrong; empty when all is well."""
    return _codec_problems(settings) + _local_steps_problems(settings)


def _codec_problems(settings: StrategySettings) -> list[str]:
    found: list[str] = []
    try:
        if codec_from_spec(settings.sync_codec).for_gradients and settings.sync_strategy != "every_step":
            found.append(
                f"sync_codec={settings.sync_codec!r} accumulates gradients with a momentum of its own, so it needs "
                f"sync_strategy='every_step', got {settings.sync_strategy!r}: topk compresses changes of parameters"
            )
    except ConfigurationError as error:
        found += error.problems
    try:
        final = codec_from_spec(settings.sync_final_codec or "int8")
        if not final.sends_all:
            found.append(f"sync_final_codec must send every element, as int8 and bf16 do, got {final.spec!r}")
    except ConfigurationError as error:
        found += [problem.replace("sync_codec", "sync_final_codec") for problem in error.problems]
    if not isinstance(settings.sync_feedback_decay, int | float) or not 0 <= settings.sync_feedback_decay <= 1:
        found.append(f"sync_feedback_decay must be between 0 and 1, got {settings.sync_feedback_decay!r}")
    if not settings.sync_error_feedback:
        found += [
            f"{name} acts only with sync_error_feedback, which remembers what was not sent, got "
            f"{getattr(settings, name)!r}: leave it out, or set sync_error_feedback"
            for name, default in (("sync_feedback_decay", 1.0), ("sync_keep_unsent", False))
            if getattr(settings, name) != default
        ]
    return found


def _local_steps_problems(settings: StrategySettings) -> list[str]:
    found = []
    pace = None
    try:
        pace = Pace.parse(settings.sync_every)
    except ValueError as error:
        found.append(f"sync_every {error}")
    lr, momentum, fragments = settings.sync_outer_lr, settings.sync_outer_momentum, settings.sync_fragments
    if not isinstance(lr, int | float) or not 1e-6 <= lr <= 1e6:  # float32 has 0 for what is far below, see `outer`
        found.append(f"sync_outer_lr must be a number from 1e-6 to 1e6, got {lr!r}")
    if not isinstance(momentum, int | float) or (momentum != 0 and not 1e-6 <= momentum <= 1 - 1e-6):
        found.append(f"sync_outer_momentum must be 0, or from 1e-6 to 0.999999, got {momentum!r}")
    if settings.sync_outer == "average" and (lr, momentum) != (1, 0):
        found.append(
            f"sync_outer='average' takes neither learning rate nor momentum, got sync_outer_lr={lr!r} and "
            f"sync_outer_momentum={momentum!r}: use sync_outer='sgd' or 'nesterov'"
        )
    if settings.sync_outer == "nesterov" and momentum == 0:
        found.append("sync_outer='nesterov' needs sync_outer_momentum above 0, got 0: DiLoCo takes 0.9")
    if not isinstance(fragments, int) or fragments < 1:
        found.append(f"sync_fragments must be at least 1, got {fragments!r}")
    elif pace is not None and fragments > 1 and (pace.first != pace.last or pace.last % fragments):
        found.append(
            f"sync_fragments must divide a fixed sync_every, so that each fragment is exchanged every sync_every "
            f"steps, got {fragments} and {settings.sync_every}"
        )
    if settings.sync_lora_merge == "product" and (settings.sync_outer, fragments) != ("average", 1):
        found.append(
            "sync_lora_merge='product' needs sync_outer='average' and sync_fragments=1, since the merged factors are "
            f"those of the averaged products, got {settings.sync_outer!r} and {fragments!r}"
        )
    if settings.sync_lora_merge == "product" and settings.sync_backend == "device":
        found.append(
            "sync_lora_merge='product' needs sync_backend='auto' or 'host', since the products are factored on the "
            "host, got 'device'"
        )
    if settings.sync_strategy == "every_step":
        found += [
            f"{name} acts only with sync_strategy='local_steps', got {getattr(settings, name)!r}: set the strategy, or "
            "leave it out"
            for name, default in _LOCAL_STEPS_ONLY.items()
            if getattr(settings, name) != default
        ]
        if settings.sync_lora_merge == "product":
            found.append(
                "sync_lora_merge='product' acts only with sync_strategy='local_steps': with every_step all clusters "
                "hold the same A and B, so the mean of their gradients is exact"
            )
    return found
