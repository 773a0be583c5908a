"""One teacher, as its student sees it: asked ahead, lost, found again; answers in order, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_nebula.distill.cache import AnswerCache
from paddlenlp_nebula.distill.depth import Depth
from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent
from paddlenlp_nebula.distill.messages import Answer, Question
from paddlenlp_nebula.distill.offer import Inputs, Offer, Wish, disagreements, note_of
from paddlenlp_nebula.errors import HandshakeError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.deadlines import Deadline, Reminder
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.link.star import Star

__all__ = ["Account", "Manners", "Tutor"]

_WAIT_S = 0.2


@dataclass(frozen=True)
class Manners:
    """How a student goes about a teacher.

    Attributes:
        on_loss: ``continue`` without its answers while it is away, or ``pause`` until it is back.
        pause_s: longest pause, seconds.
        ahead: questions and answers held at once, at most.
        memory_mb: of the answers held, at most, 10^6 bytes.
        cache: folder for answers; None asks anew each time.
        cache_mb: of its file, 10^6 bytes.
    """

    on_loss: str = "continue"
    pause_s: float = 3600.0
    ahead: int = 32
    memory_mb: float = 256.0
    cache: Path | None = None
    cache_mb: float = 10_000.0


@dataclass
class Account:
    """What has passed between a student and one teacher.

    Attributes:
        asked, answered: questions sent (again after a loss), and answers that came.
        cached: batches that were found on disk.
        without: batches that were trained on without this teacher.
        rows: positions of the answers that came.
        bytes_sent, bytes_received: payloads of questions and of answers.
        seconds_waiting: that the student had nothing to do but wait for this teacher, pauses excepted.
        seconds_paused: of waiting for its return.
        seconds_teacher: that the teacher took for the answers.
        seconds_decoding: that their decoding took.
        losses, returns: of the teacher.
    """

    asked: int = 0
    answered: int = 0
    cached: int = 0
    without: int = 0
    rows: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    seconds_paused: float = 0.0
    seconds_teacher: float = 0.0
    seconds_decoding: float = 0.0
    losses: int = 0
    returns: int = 0

    @property
    def bytes_per_row(self) -> float:
        """Bytes of an answer for each position (token) that it is about; 0 before the first."""
        return self.bytes_received / self.rows if self.rows else 0.0


@dataclass
class _Pending:
    """A batch that has been asked about, or is to be."""

    question: Question
    extent: Extent
    asked_at: float | None = None
    answer: Answer | None = None
    forgotten: bool = False  # nobody wants the answer any more, but it will come


class Tutor:
    """A student's end of its line to one teacher.

    Nothing runs in the background but what the star brings: all is done in `ask`, `poll` and `take`. What the teacher
    sends meanwhile arrives in the courier's memory.

    Args:
        star: this cluster's end; the teacher is the hub.
        wish: what is asked for.
        manners: how.
        report: told, in a sentence, of each loss and return.

    Attributes:
        name: the teacher's cluster.
        offer: the teacher's; None before `meet`.
        account: counts.
        pace: the times that the depth follows from.
        cache: answers on disk, after `meet`, or None.
    """

    def __init__(
        self, star: Star, wish: Wish, manners: Manners, report: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.name = star.hub
        self.wish = wish
        self.offer: Offer | None = None
        self.account = Account()
        self.pace = Depth(manners.ahead)
        self.cache: AnswerCache | None = None
        self._star, self._link = star, star.link
        self._manners = manners
        self._report = report
        self._there = False  # the teacher, and it has said what it offers
        self._loss: PeerLost | None = None
        self._pending: dict[int, _Pending] = {}  # by position, in order
        self._largest = 1  # bytes of an answer

    def meet(self, timeout_s: float) -> None:
        """Wait for the teacher and what it offers.

        Raises:
            NebulaError: it did not come in time.
            HandshakeError: it does not offer what is wished for; the sentence is the same on both sides.
        """
        deadline = Deadline(timeout_s)
        while True:
            self.poll()
            if self._there:
                break
            if deadline.passed() or (self._loss is not None and not self._star.returns):
                raise self._loss or NebulaError(
                    f"student {self._link.cluster!r} waited {timeout_s:g} s for teacher {self.name!r}, which said nothing: "
                    "is it started, and does it name the same clusters in the same order?"
                )
            self._link.wait(_WAIT_S)
        assert self.offer is not None
        if self._manners.cache is not None:
            source = Identity(0, "0" * 32, self.wish.tokenizer, self.offer.teacher, self.wish.knowledge).source
            self.cache = AnswerCache(self._manners.cache, self._manners.cache_mb, source, self._report)

    @property
    def ahead(self) -> int:
        """Batches that are worth being asked about now, the next one to be taken included."""
        return self.pace.depth

    def ask(self, position: int, inputs: Inputs) -> None:
        """Want the answer about a batch; positions ascend.

        Args:
            position: of the batch in the data.
            inputs: of the teacher's model.

        Raises:
            NebulaError: the batch is none that the two have agreed on.
        """
        assert self.offer is not None, "meet() comes first"
        extent = self.wish.extent(inputs, self.offer)
        fingerprint = batch_fingerprint(inputs)
        identity = Identity(position, fingerprint, self.wish.tokenizer, self.offer.teacher, self.wish.knowledge)
        pending = _Pending(Question(identity, {} if self.wish.data else inputs), extent)
        if self.cache is not None and (found := self.cache.get(identity)) is not None:
            pending.answer = found
            self.account.cached += 1
        if position in self._pending:
            raise ValueError(f"batch {position} is asked about already")
        self._pending[position] = pending
        self._largest = max(self._largest, sum(kind.bound(extent) for kind in self.wish.kinds))
        self.pace.most = max(
            1, min(self._manners.ahead, self.offer.ahead, int(1e6 * self._manners.memory_mb / self._largest))
        )
        self.poll()

    def poll(self) -> None:
        """Do what can be done without waiting.

        Raises:
            HandshakeError: a teacher has come back that is not the one that was lost, or offers something else.
            ProtocolError: an answer is not that to its question.
            NebulaError: the teacher has none to one (numbers that are not finite); it says why.
        """
        for _ in self._star.look():
            self._link.post(Kind.HELLO, pack_note(note_of(self.wish)), to=[self.name])
        try:
            while self.name in self._link.peers and self._hear():
                pass
        except PeerLost as loss:
            self._lose(loss)
        self._send()

    def take(self, position: int) -> Arrays | None:
        """The answer about a batch; None while the teacher is away, with ``on_loss=continue``.

        Raises:
            PeerLost: the teacher is away, and did not come back within ``pause_s``, or cannot.
            Exception: as for `poll`.
        """
        start = time.perf_counter()
        pending = self._pending[position]
        paused = self._await(pending)
        waited = time.perf_counter() - start
        self.account.seconds_paused += paused
        self.account.seconds_waiting += waited - paused
        del self._pending[position]
        if pending.answer is None:
            self.account.without += 1
            return None
        start = time.perf_counter()
        arrays = pending.answer.arrays(pending.question.identity, self.wish.kinds, pending.extent, self._sender)
        self.account.seconds_decoding += time.perf_counter() - start
        self._send()
        return arrays

    def forget(self, position: int) -> None:
        """The answer about a batch is not wanted after all."""
        pending = self._pending[position]
        if pending.asked_at is None or pending.answer is not None:
            del self._pending[position]
        else:
            pending.forgotten = True

    def leave(self, reason: str, *, deliberate: bool) -> None:
        """Say goodbye and free everything. Idempotent."""
        self._star.leave(reason, deliberate=deliberate)
        if self.cache is not None:
            self.cache.close()

    def report(self) -> dict[str, Any]:
        """What there is to be told of this teacher, in JSON."""
        return {
            **vars(self.account),
            "bytes_per_row": self.account.bytes_per_row,
            "depth": self.ahead,
            "limits": self.pace.limits,
            "slowdown": self.pace.slowdown,
            "step_s": self.pace.step_s,
            "teacher_s": self.pace.teacher_s,
        }

    # Inside

    @property
    def _sender(self) -> str:
        return f"teacher {self.name!r}"

    def _await(self, pending: _Pending) -> float:
        """Wait until a batch has its answer, or will have none; returns the seconds of it that the teacher was away."""
        link = self._link
        deadline, pause, paused = Deadline(link.timeout_s), Deadline(self._manners.pause_s), 0.0
        reminder, heard = Reminder(self._report), -1
        while True:
            self.poll()
            if pending.answer is not None:
                return paused
            if self._there:
                channel = link.channels[self.name]
                if (moved := channel.bytes_received + channel.bytes_delivered) != heard:
                    heard = moved
                    deadline.renew()
                if deadline.passed():
                    self._lose(
                        PeerLost(self.name, f"it gave no answer for {link.timeout_s:g} s although it is connected")
                    )
                    continue
                link.wait(min(_WAIT_S, deadline.remaining_s()))
                continue
            if self._manners.on_loss == "continue":
                return paused
            if pause.passed() or not self._star.returns:
                raise self._loss or PeerLost(self.name, "it has not come back")
            reminder.say(f"training pauses until teacher {self.name!r} is back, {pause.remaining_s():.0f} s more")
            began = time.perf_counter()
            link.wait(_WAIT_S)
            paused += time.perf_counter() - began
            deadline.renew()

    def _send(self) -> None:
        """Ask what is to be asked, as far ahead as is worth while."""
        if not self._there:
            return
        for pending in list(self._pending.values())[: self.ahead]:
            if pending.answer is None and pending.asked_at is None:
                payload = pending.question.pack()
                self._link.post(Kind.QUESTION, payload, to=[self.name])
                pending.asked_at = time.perf_counter()
                self.account.asked += 1
                self.account.bytes_sent += len(payload)

    def _hear(self) -> bool:
        """Take in the teacher's next message, if there is one. What is wrong with it is not a loss, but an error."""
        with self._link.next_message(self.name) as message:
            if message is None:
                return False
            frame, payload = message.frame, bytes(message.payload)
        if frame.kind is Kind.ANSWER and self._there:
            self._receive(memoryview(payload), frame.part / 1e6, frame.flags)
        elif frame.kind is Kind.UNANSWERED and self._there:
            note = parse_note(payload, frame.kind.name, self._sender)
            raise NebulaError(str(note.get("reason"))[:2000])
        elif frame.kind is Kind.HELLO and not self._there:
            self._greet(Offer.parse(parse_note(payload, frame.kind.name, self._sender), self._sender))
        else:
            raise ProtocolError(f"{self._sender} must say what it offers, and then answer, got {frame.kind.name}")
        return True

    def _greet(self, offer: Offer) -> None:
        """The teacher has said what it offers."""
        if problems := disagreements(offer, self.wish, self.name, self._link.cluster):
            raise HandshakeError("; ".join(problems))
        if self.offer is not None and offer.teacher != self.offer.teacher:
            raise HandshakeError(
                f"teacher {self.name!r} had the fingerprint {self.offer.teacher} but has come back with {offer.teacher}: "
                "start it with the weights that it had, or the student anew"
            )
        if self.offer is not None:
            self.account.returns += 1
            self._report(f"teacher {self.name!r} is back: {self.account.without} batches so far were without it")
        self.offer, self._there, self._loss = offer, True, None

    def _receive(self, payload: memoryview, teacher_s: float, waiting: int) -> None:
        answer = Answer.parse(payload, self._sender)
        pending = self._pending.get(answer.identity.position)
        if pending is None or pending.asked_at is None or pending.answer is not None:
            raise ProtocolError(
                f"{self._sender} has answered about batch {answer.identity.position}, which was not asked"
            )
        pending.question.identity.check(answer.identity, self._sender)
        pending.answer = answer
        account = self.account
        account.answered += 1
        account.rows += pending.extent.rows
        account.bytes_received += payload.nbytes
        account.seconds_teacher += teacher_s
        self.pace.answered(time.perf_counter() - pending.asked_at, teacher_s, waiting)
        if self.cache is not None:
            self.cache.put(answer)
        if pending.forgotten:
            del self._pending[answer.identity.position]

    def _lose(self, loss: PeerLost) -> None:
        """The teacher is away; what it has not answered is asked again when it is back."""
        self._star.lose(loss)
        if self._there:
            self.account.losses += 1
            self._report(f"teacher {self.name!r} was lost: {loss.reason}")
        self._there, self._loss = False, loss
        self._pending = {at: pending for at, pending in self._pending.items() if not pending.forgotten}
        for pending in self._pending.values():
            pending.asked_at = None
