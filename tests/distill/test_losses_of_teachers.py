"""Teachers and students that go and come back: real doors, couriers that are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.service import Batch, Service
from paddlenlp_nebula.distill.tutor import Manners, Tutor
from paddlenlp_nebula.errors import HandshakeError, NebulaError, PeerLost
from tests.link.test_door import until
from tests.link.test_rendezvous import Courier
from tests.link.test_star import ROSTER, _where, opened  # noqa: F401 (a fixture)

from .school import OTHER_TEACHER, answer, batch, labels, offer, wish

pytestmark = pytest.mark.timeout(90)


class Death(Exception):
    """The end of one, without a word."""


class Part:
    """A thread that does something, and its outcome."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error

    def end(self, timeout_s: float = 40.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "hung"
        return self.outcome


class Teacher:
    """Serves in a thread; can be killed."""

    def __init__(self, where: str, roster: Sequence[str] = ROSTER, **offered: Any) -> None:
        self.star = opened("amber", where, roster)
        self.service = Service(self.star, offer(**offered), self.answer)
        self.answered = 0
        self.killed = False
        self.part = Part(self.serve)

    def answer(self, asked: Batch) -> Any:
        self.answered += 1
        return answer(asked)

    def serve(self) -> Service:
        def tick() -> None:
            if self.killed:
                raise Death

        self.service._on_tick = tick
        self.star.leave, leave = lambda *_, **__: self.star.close() if self.killed else leave(*_, **__), self.star.leave  # type: ignore[method-assign]
        self.service.serve()
        return self.service

    def kill(self) -> None:
        self.killed = True
        assert isinstance(self.part.end(), Death)


class Student:
    """Takes batches in a thread, for as long as it is told to."""

    def __init__(self, name: str, where: str, manners: Manners | None = None, roster: Sequence[str] = ROSTER) -> None:
        self.told: list[bool] = []
        self.stopped = False
        self.tutor: Tutor | None = None
        self.part = Part(lambda: self.study(name, where, manners or Manners(), roster))

    def study(self, name: str, where: str, manners: Manners, roster: Sequence[str]) -> Tutor:
        self.tutor = tutor = Tutor(opened(name, where, roster), wish(), manners, print)
        client = Client([tutor])
        try:
            client.meet(10)
            for number, answers in client.accompany(self.numbers(), batch):
                told = answers["amber"]
                if told is not None:
                    np.testing.assert_array_equal(told["labels"], labels(batch(number)))
                self.told.append(told is not None)
                time.sleep(0.01)
        except BaseException as error:
            client.leave(str(error), deliberate=False)
            raise
        client.leave("it has learnt enough", deliberate=True)
        return tutor

    def numbers(self) -> Any:
        number = 0
        while not self.stopped:
            yield number
            number += 1

    def taught(self, count: int = 3) -> bool:
        """Whether the last batches had answers."""
        return len(self.told) >= count and all(self.told[-count:])

    def learns_more(self) -> None:
        """Until ten further batches had answers."""
        before = len(self.told)
        until(lambda: (len(self.told) >= before + 10 and self.taught(10)) or self.part.outcome is not None, 30)
        assert self.part.outcome is None, self.part.outcome

    def end(self) -> Tutor:
        self.stopped = True
        outcome = self.part.end()
        assert isinstance(outcome, Tutor), outcome
        return outcome


def test_students_come_when_they_like_and_the_service_ends_with_the_last(where: str) -> None:
    teacher = Teacher(where)
    birch = Student("birch", where)
    birch.learns_more()
    cedar = Student("cedar", where)
    cedar.learns_more()
    birch.end()
    cedar.learns_more()
    assert teacher.part.outcome is None
    cedar.end()
    service = teacher.part.end()
    assert isinstance(service, Service), service
    assert {name: served.losses for name, served in service.served.items()} == {"birch": 0, "cedar": 0}
    assert not Courier.open


def test_a_teacher_that_is_killed_is_found_again(where: str) -> None:
    teacher, birch = Teacher(where, ROSTER[:2]), Student("birch", where, roster=ROSTER[:2])
    birch.learns_more()
    teacher.kill()
    until(lambda: birch.told and not birch.told[-1], 20)
    teacher = Teacher(where, ROSTER[:2])
    birch.learns_more()
    account = birch.end().account
    assert (account.losses, account.returns) == (1, 1)
    assert account.without == birch.told.count(False)
    assert isinstance(teacher.part.end(), Service)


def test_a_pause_lasts_until_the_teacher_is_back(where: str) -> None:
    teacher, birch = Teacher(where, ROSTER[:2]), Student("birch", where, Manners("pause"), ROSTER[:2])
    birch.learns_more()
    teacher.kill()
    time.sleep(1.0)
    seen = len(birch.told)
    time.sleep(0.5)
    assert len(birch.told) == seen
    teacher = Teacher(where, ROSTER[:2])
    birch.learns_more()
    account = birch.end().account
    assert all(birch.told)
    assert (account.losses, account.returns, account.without) == (1, 1, 0)
    assert account.seconds_paused > 1
    teacher.part.end()


def test_a_pause_has_an_end(where: str) -> None:
    teacher = Teacher(where, ROSTER[:2])
    birch = Student("birch", where, Manners("pause", pause_s=0.5), ROSTER[:2])
    birch.learns_more()
    teacher.kill()
    assert isinstance(birch.part.end(20), PeerLost)


def test_a_courier_that_dies_costs_a_few_batches(where: str) -> None:
    teacher, birch = Teacher(where, ROSTER[:2]), Student("birch", where, roster=ROSTER[:2])
    birch.learns_more()
    assert birch.tutor is not None
    birch.tutor._link.channels["amber"].killed = True  # type: ignore[attr-defined]
    until(lambda: birch.tutor is not None and birch.tutor.account.returns == 1, 30)
    birch.learns_more()
    birch.end()
    service = teacher.part.end()
    assert service.served["birch"].losses == 1


def test_a_student_that_is_killed_comes_back(where: str) -> None:
    def dies() -> None:
        star = opened("birch", where)
        tutor = Tutor(star, wish(), Manners())
        tutor.meet(10)
        tutor.ask(0, batch(0))
        assert tutor.take(0) is not None
        star.close()

    teacher, cedar = Teacher(where), Student("cedar", where)
    assert Part(dies).end() is None
    birch = Student("birch", where)
    birch.learns_more()
    cedar.learns_more()
    birch.end()
    cedar.end()
    service = teacher.part.end()
    assert service.served["birch"].losses == 1
    assert service.served["cedar"].losses == 0


def test_another_teacher_under_the_same_name_is_an_error(where: str) -> None:
    teacher, birch = Teacher(where, ROSTER[:2]), Student("birch", where, roster=ROSTER[:2])
    birch.learns_more()
    teacher.kill()
    teacher = Teacher(where, ROSTER[:2], teacher=OTHER_TEACHER)
    error = birch.part.end()
    assert isinstance(error, HandshakeError)
    assert f"had the fingerprint {'aa' * 16} but has come back with {'bb' * 16}" in str(error)
    teacher.kill()


def test_a_teacher_that_never_comes_is_named(where: str) -> None:
    hub, leaf = opened("amber", where), opened("birch", where)
    with pytest.raises(NebulaError, match=r"student 'birch' waited 0.5 s for teacher 'amber', which said nothing"):
        Tutor(leaf, wish(), Manners()).meet(0.5)
    leaf.close()
    hub.close()
