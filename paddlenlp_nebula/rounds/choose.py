"""The settings' choice of a strategy."""

from __future__ import annotations

from typing import Any

from paddlenlp_nebula.rounds.base import Rounds
from paddlenlp_nebula.rounds.every_step import EveryStepRounds
from paddlenlp_nebula.rounds.local_steps import LocalStepsRounds
from paddlenlp_nebula.rounds.lora_product import LoraProductRounds
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.tensors import Tensor

__all__ = ["rounds_for"]


def rounds_for(run: Run, selection: Selection, optimizer: Any, max_steps: int, model: Tensor) -> Rounds:
    """What ``sync_strategy`` and ``sync_lora_merge`` ask for."""
    if run.arguments.sync_strategy == "every_step":
        return EveryStepRounds(run, selection, optimizer, max_steps)
    if run.arguments.sync_lora_merge == "product":
        return LoraProductRounds(run, selection, optimizer, max_steps, model)
    return LocalStepsRounds(run, selection, optimizer, max_steps)
