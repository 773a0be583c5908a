"""The student's side: its batches, each with what the teachers say about it, asked for some batches ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from paddlenlp_nebula.distill.knowledge.knowledge import Arrays
from paddlenlp_nebula.distill.offer import Inputs
from paddlenlp_nebula.distill.tutor import Tutor

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """Asks several teachers about the same batches.

    Args:
        tutors: one for each teacher, of different names.
    """

    def __init__(self, tutors: Sequence[Tutor]) -> None:
        self.tutors = tuple(tutors)

    def meet(self, timeout_s: float) -> None:
        """Wait for all teachers; see `Tutor.meet`."""
        for tutor in self.tutors:
            tutor.meet(timeout_s)

    def accompany(
        self, batches: Iterable[T], inputs_of: Callable[[T], Inputs], first: int = 0
    ) -> Iterator[tuple[T, dict[str, Arrays | None]]]:
        """Each batch in turn, with every teacher's answer.

        Batches are taken from the iterable as far ahead as the farthest teacher needs.

        Args:
            batches: what is trained on.
            inputs_of: a batch -> what the teachers' models take of it.
            first: position of the first batch in the data.

        Yields:
            The batch, and teacher -> arrays; None for a teacher that is away (``on_loss=continue``).

        Raises:
            Exception: as for `Tutor.take`.
        """
        ahead: deque[tuple[int, T]] = deque()
        source, position, came_back = iter(batches), first, time.perf_counter()
        try:
            while True:
                while len(ahead) < max((tutor.ahead for tutor in self.tutors), default=1):
                    try:
                        batch = next(source)
                    except StopIteration:
                        break
                    for tutor in self.tutors:
                        tutor.ask(position, inputs_of(batch))
                    ahead.append((position, batch))
                    position += 1
                if not ahead:
                    return
                own = time.perf_counter() - came_back
                at, batch = ahead.popleft()
                answers = {}
                for tutor in self.tutors:
                    before = tutor.account.seconds_waiting
                    answers[tutor.name] = tutor.take(at)
                    tutor.pace.stepped(own, tutor.account.seconds_waiting - before)
                came_back = time.perf_counter()
                yield batch, answers
        finally:
            for at, _ in ahead:  # somebody stops in the middle
                for tutor in self.tutors:
                    tutor.forget(at)

    def leave(self, reason: str, *, deliberate: bool) -> None:
        """Say goodbye to all teachers and free everything. Idempotent."""
        for tutor in self.tutors:
            tutor.leave(reason, deliberate=deliberate)

    def report(self) -> dict[str, Any]:
        """Teacher -> figures."""
        return {tutor.name: tutor.report() for tutor in self.tutors}
