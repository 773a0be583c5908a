"""A step that the Trainer takes although the clusters have ended before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paddlenlp_nebula.tensors import Tensor, set_gradient

__all__ = ["VoidStep"]


class VoidStep:
    """Once gradients are complete nothing stops the Trainer from taking the step, so it takes one that changes nothing.

    Without gradients an optimizer leaves parameters and moments alone, whatever momentum there is; the rest is put
    back. (The Trainer's ``train_loss`` has counted the batch already, where no callback reaches.)

    Args:
        state: the TrainerState.
        parameters: those that the optimizer would change.
        scheduler: the learning rate's.
    """

    def __init__(self, state: Any, parameters: Iterable[Tensor], scheduler: Any) -> None:
        self._epoch = state.epoch
        self._scheduler = scheduler
        self._schedule = scheduler.state_dict()
        for parameter in parameters:
            set_gradient(parameter, None)

    def after_optimizer(self, state: Any) -> None:
        """For ``on_optimizer_end``: the Trainer is about to count the step."""
        self._scheduler.set_state_dict(self._schedule)
        state.global_step -= 1

    def after_step(self, state: Any, control: Any) -> None:
        """For ``on_step_end``: what is due at the last real step has been done then."""
        state.epoch = self._epoch
        control.should_log = control.should_evaluate = control.should_save = False
        control.should_training_stop = True
