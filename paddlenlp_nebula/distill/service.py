"""The teacher's side: answers the questions of all its students in turn, one at a time, on its leader."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec
from paddlenlp_nebula.distill.messages import Answer, Question
from paddlenlp_nebula.distill.offer import Inputs, Offer, Wish, disagreements, note_of
from paddlenlp_nebula.errors import ConfigurationError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import MAX_PAYLOAD_BYTES, Kind
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.link.star import Star

__all__ = ["Batch", "Served", "Service"]

_WAIT_S = 0.2


@dataclass(frozen=True)
class Batch:
    """What a teacher's model is asked about.

    Attributes:
        inputs: of the model.
        kinds: of knowledge that are wanted.
        extent: that the arrays must cover.
        name: what it is called in messages: the student's, and where in its data the batch is.
    """

    inputs: Inputs
    kinds: tuple[Knowledge, ...]
    extent: Extent
    name: str


@dataclass
class Served:
    """What has been done for one student.

    Attributes:
        answered: questions.
        unanswered: questions that the model had no answer for (not finite, another batch).
        rows: positions of all answers.
        bytes_received, bytes_sent: payloads of questions and of answers.
        seconds: that answering has taken.
        losses: how often the student went away without a goodbye.
        refused: why, the last time that it wished for what is not offered.
    """

    answered: int = 0
    unanswered: int = 0
    rows: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    losses: int = 0
    refused: str = ""


@dataclass
class _Student:
    """One that is there."""

    wish: Wish | None = None  # until it has said what it wants
    questions: deque[Question] = field(default_factory=deque)


class Service:
    """Answers the students of a star until all have said goodbye.

    Of each student only as many questions are taken in as have been offered; the rest waits in its own memory. A student
    whose answers do not get through is passed over, so that it holds up nobody.

    Args:
        star: this cluster's end, the hub.
        offer: what is answered.
        answer: runs the model; the arrays of all kinds that the batch asks for. It may raise a NebulaError (a number
            that is not finite): the student gets to know it, and the others are answered as before.
        batch_at: position -> the inputs of that batch, where the offer has ``data``.
        report: told, in a sentence, of each loss, refusal and batch without an answer.
        on_tick: called between answers, and at least every 0.2 s while there are no questions.

    Attributes:
        served: by student.

    Raises:
        ConfigurationError: the offer has knowledge that it cannot have.
    """

    def __init__(
        self,
        star: Star,
        offer: Offer,
        answer: Callable[[Batch], Arrays],
        *,
        batch_at: Callable[[int], Inputs] | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        if bool(offer.data) != (batch_at is not None):
            raise ConfigurationError(["an offer must name its data if, and only if, batches can be derived from it"])
        if offer.knowledge:
            knowledge_from_spec(offer.knowledge)
            own = Wish(offer.tokenizer, offer.tokens, offer.vocabulary, offer.knowledge, offer.longest)
            if problems := disagreements(offer, own, star.link.cluster, star.link.cluster):
                raise ConfigurationError(problems)
        self.offer = offer
        self.served = {name: Served() for name in star.others}
        self._star = star
        self._link = star.link
        self._answer = answer
        self._batch_at = batch_at
        self._report = report
        self._on_tick = on_tick
        self._students: dict[str, _Student] = {}
        self._turns = itertools.cycle(star.others)
        self._ending: str | None = None

    def serve(self) -> None:
        """Answer until all students have said goodbye, or `stop`; then part.

        Raises:
            Exception: whatever the model raised; the students are told.
        """
        try:
            while self._ending is None and not self._all_have_left():
                self._look()
                self._on_tick()
                if not self._answer_next():
                    self._link.wait(_WAIT_S)
        except BaseException as error:
            self._star.leave(f"{type(error).__name__}: {error}", deliberate=False)
            raise
        self._star.leave(self._ending or "all students have left", deliberate=True)

    @property
    def present(self) -> tuple[str, ...]:
        """Students that are connected."""
        return tuple(self._link.peers)

    def stop(self, reason: str = "the teacher was told to end") -> None:
        """End after the answer under way; may be called from a signal handler."""
        self._ending = reason

    # Inside

    def _all_have_left(self) -> bool:
        """For good, that is: who was lost may come back, where there is a way."""
        if self._star.returns:
            return self._star.ended >= set(self._star.others)
        return not self._link.peers

    def _look(self) -> None:
        for name in self._star.look():
            self._students[name] = _Student()
            self._link.post(Kind.HELLO, pack_note(note_of(self.offer)), to=[name])
        for name in self._link.peers:
            try:
                while self._has_room(name) and self._hear(name):
                    pass
            except PeerLost as loss:
                self._lose(loss)

    def _has_room(self, name: str) -> bool:
        return len(self._students[name].questions) < self.offer.ahead

    def _hear(self, name: str) -> bool:
        """Take in a student's next message, if there is one."""
        student, sender = self._students[name], f"student {name!r}"
        with self._link.next_message(name) as message:
            if message is None:
                return False
            kind = message.frame.kind
            if kind is Kind.HELLO and student.wish is None:
                student.wish = self._welcome(name, Wish.parse(parse_note(message.payload, kind.name, sender), sender))
            elif kind is Kind.QUESTION and student.wish is not None:
                question = Question.parse(message.payload, sender)
                self._check(question, student.wish, sender)
                student.questions.append(question)
                self.served[name].bytes_received += message.frame.length
            else:
                raise ProtocolError(f"{sender} must say what it wishes, and then ask, got {kind.name}")
        return True

    def _welcome(self, name: str, wish: Wish) -> Wish:
        self.served[name].refused = "; ".join(disagreements(self.offer, wish, self._link.cluster, name))
        if self.served[name].refused:
            self._report(self.served[name].refused)
        return wish

    def _check(self, question: Question, wish: Wish, sender: str) -> None:
        """Whether a question is one that has been agreed on.

        Raises:
            ProtocolError: it is not.
        """
        name = self.offer
        asked = question.identity
        agreed = Identity(asked.position, asked.batch, name.tokenizer, name.teacher, wish.knowledge)
        agreed.check(asked, f"a question of {sender}")
        if bool(question.inputs) == bool(wish.data):
            raise ProtocolError(f"{sender} must send its batches exactly if it has named no data, got {wish.data!r}")
        if question.inputs:
            try:
                wish.extent(question.inputs, self.offer)
            except NebulaError as error:
                raise ProtocolError(f"a question of {sender} is none: {error}") from None

    def _answer_next(self) -> bool:
        """Answer the next student's oldest question; whether there was one."""
        for name in itertools.islice(self._turns, len(self.served)):
            student = self._students.get(name)
            if student is not None and student.questions and self._link.room_for(0, [name]):
                self._reply(name, student)
                return True
        return False

    def _reply(self, name: str, student: _Student) -> None:
        question = student.questions.popleft()
        waiting = sum(len(each.questions) for at, each in self._students.items() if self._link.room_for(0, [at]))
        served, asked, start = self.served[name], question.identity, time.perf_counter()
        assert student.wish is not None
        try:
            if served.refused:
                raise NebulaError(served.refused)
            inputs = question.inputs or self._derive(asked, name)
            extent = student.wish.extent(inputs, self.offer)
            batch = Batch(inputs, student.wish.kinds, extent, f"batch {asked.position} of student {name!r}")
            payload = Answer.to(asked, batch.kinds, self._answer(batch), extent).pack()
            if len(payload) > MAX_PAYLOAD_BYTES:
                raise NebulaError(
                    f"an answer must have at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)} for {extent.rows} rows of "
                    f"{asked.knowledge}: use smaller batches"
                )
        except NebulaError as error:
            served.unanswered += 1
            reason = (
                f"teacher {self._link.cluster!r} has no answer for batch {asked.position} of student {name!r}: {error}"
            )
            self._report(reason)
            note = {"position": asked.position, "reason": reason[:2000]}
            self._link.post(Kind.UNANSWERED, pack_note(note), to=[name])
            return
        seconds = time.perf_counter() - start
        served.answered += 1
        served.rows += extent.rows
        served.seconds += seconds
        served.bytes_sent += len(payload)
        self._link.post(
            Kind.ANSWER, payload, part=min(int(1e6 * seconds), (1 << 32) - 1), flags=min(waiting, 0xFFFF), to=[name]
        )

    def _derive(self, asked: Identity, name: str) -> Inputs:
        """The batch that a student has asked about by its place alone."""
        assert self._batch_at is not None
        inputs = self._batch_at(asked.position)
        if (found := batch_fingerprint(inputs)) != asked.batch:
            raise NebulaError(
                f"it has the fingerprint {found} here but {asked.batch} there: do both sides derive the same batches?"
            )
        return inputs

    def _lose(self, loss: PeerLost) -> None:
        self._star.lose(loss)
        self._students.pop(loss.peer, None)
        if not loss.deliberate:
            self.served[loss.peer].losses += 1
            self._report(f"student {loss.peer!r} was lost: {loss.reason}")
