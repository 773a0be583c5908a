"""A teacher's block and the student's block that learns to do the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import paddle
from paddle import nn

from paddlenlp_nebula.distill.blockwise.blocks import Block, Parts, cut
from paddlenlp_nebula.distill.losses.hidden import Projection, squared_error
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Average", "Pair", "StudentBlock", "pairs_of"]

Average: TypeAlias = Callable[[Sequence[Tensor], int], None]
"""Replaces the gradients of parameters by their means over the processes that share a batch, weighted by the rows (the
second argument: this process's) that each has learned from."""


class StudentBlock(nn.Layer):
    """A student's block between the teacher's activations: with a projection on each side where widths differ.

    Where they do, these projections are part of the student: of two neighbouring blocks, the one's last and the other's
    first map the student's width to itself.

    Args:
        block: the student's.
        teacher_width: of the teacher's hidden states.
    """

    def __init__(self, block: Block, teacher_width: int) -> None:
        super().__init__()
        self.block, differs = block, block.width != teacher_width
        self.entry = Projection(teacher_width, block.width) if differs and not block.first else None
        self.exit = Projection(block.width, teacher_width) if differs else None

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        """As `Block.forward`, at the teacher's width; float32 where a projection comes last."""
        hidden = self.block(state if self.entry is None else self.entry(state), mask)
        return hidden if self.exit is None else self.exit(hidden)


class Pair:
    """Trains a student's block towards the teacher's, whatever other blocks do.

    The loss is the mean squared difference between what both make of the teacher's activation, over positions that
    count and coordinates. Nothing of it depends on another student block, so the block's own optimizer steps as soon
    as its gradient is there: in Pipe-BD's words (arXiv 2301.12443, abstract), without modifying the mathematical
    formulation of block-wise distillation. Pipe-BD's own code trains a block by the same loss (``nn.MSELoss``,
    ``NAS/profile.py`` of github.com/hongsunjang/pipe-bd).

    Args:
        teacher: its block, put into evaluation mode; its parameters never change.
        student: the block that learns.
        optimizer: makes an optimizer for a list of parameters.
        average: for a block whose batch is shared by several processes, each with a copy of the student's block.
    """

    def __init__(
        self,
        teacher: Block,
        student: StudentBlock,
        optimizer: Callable[[list[Tensor]], Any],
        average: Average | None = None,
    ) -> None:
        self.teacher, self.student = teacher, student
        self._make_optimizer, self._average = optimizer, average
        self._parameters = [parameter for parameter in student.parameters() if not parameter.stop_gradient]
        self._optimizer = optimizer(self._parameters)
        teacher.eval()

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def teach(self, state: Tensor, mask: Tensor) -> Tensor:
        """The teacher's activation after its block; arguments and result as for `Block.forward`."""
        return self.teacher(state, mask)

    def learn(self, state: Tensor, target: Tensor, mask: Tensor, places: Places) -> float:
        """One step of the student's block.

        Args:
            state: the teacher's activation before its block (token ids for the first).
            target: after it, of `teach`.
            mask: as for `Block.forward`.
            places: the same, for the loss.

        Returns:
            The loss before the step.

        Raises:
            NebulaError: the loss is no number; the block has not changed.
        """
        if places.count == 0:
            raise NebulaError(f"{places.batch} must have a position that counts, got none: is its mask all 0?")
        made = self.student(state, mask)
        loss = squared_error(places.rows(made), places.rows(target)).mean()
        value = float(loss)
        if not math.isfinite(value):
            places.check_finite(places.rows(target), "activation")
            raise NebulaError(
                f"the loss of a student's block must be a finite number, got {value} at {places.batch}: does its "
                "learning rate suit it?"
            )
        loss.backward()
        if self._average is not None:
            self._average(self._parameters, places.count)
        self._optimizer.step()
        self._optimizer.clear_grad()
        return value

    def twin(self) -> Pair:
        """One with a copy of the student's block and a fresh optimizer, to try things with."""
        return Pair(self.teacher, copy.deepcopy(self.student), self._make_optimizer)


def pairs_of(
    teacher: Parts,
    student: Parts,
    number: int,
    optimizer: Callable[[list[Tensor]], Any],
    average: Average | None = None,
) -> list[Pair]:
    """Cut both into as many blocks (`cut`), and pair these in their order; further arguments as for `Pair`."""
    return [
        Pair(block, StudentBlock(learner, teacher.width), optimizer, average)
        for block, learner in zip(cut(teacher, number), cut(student, number), strict=True)
    ]
