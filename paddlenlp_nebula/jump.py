"""After clusters have come together again all stand at the furthest one's step: the Trainer's counters follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paddlenlp_nebula.evaluation import forget_best

__all__ = ["follow"]


def follow(step: int, own: int, state: Any, scheduler: Any, skip: Callable[[int], None] | None) -> Iterator[str]:
    """Go on from ``step`` in the place of the Trainer's own; for ``on_optimizer_end``.

    The learning rate's schedule is that of the time, whoever has trained in it.

    Args:
        step: where all clusters stand.
        own: the step that the Trainer has just taken, and is about to count.
        state: the TrainerState.
        scheduler: the learning rate's.
        skip: told how many steps the Trainer must leave out when it divides its losses; None if nobody can tell it.

    Yields:
        A sentence for each thing that is not as in a run without a return.
    """
    if (forgotten := forget_best(state)) is not None:
        yield forgotten
    if step == own:
        return
    state.global_step = step - 1
    scheduler.step(step)
    if skip is not None:
        skip(step - own)
    else:
        yield (
            f"steps {own + 1} to {step} were taken by other clusters, and this Trainer divides its losses by them, too: "
            "NebulaTrainer does not"
        )
