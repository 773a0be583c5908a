"""Teachers and students over loopback links: who asks whom, what comes back, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.messages import Answer, Question
from paddlenlp_nebula.distill.offer import note_of
from paddlenlp_nebula.distill.service import Batch, Service
from paddlenlp_nebula.distill.tutor import Manners, Tutor
from paddlenlp_nebula.errors import ConfigurationError, HandshakeError, NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.notes import pack_note
from tests.link.clusters import at_once

from .school import OTHER_TEACHER, answer, batch, labels, offer, serve, stars, study, wish

pytestmark = pytest.mark.timeout(60)
BATCHES = [batch(number) for number in range(12)]


def check(told: Any, batches: list[Any], teacher: str, times: int = 7) -> None:
    assert len(told) == len(batches)
    for answers, inputs in zip(told, batches, strict=True):
        np.testing.assert_array_equal(answers[teacher]["labels"], labels(inputs, times))


def good(outcomes: dict[str, Any]) -> dict[str, Any]:
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    assert not errors, errors
    return outcomes


def test_two_students_of_one_teacher() -> None:
    ends = stars("amber", ["birch", "cedar"])
    others = [batch(number) for number in range(100, 107)]
    parts = {
        "amber": serve(ends["amber"]),
        "birch": study([ends["birch"]], BATCHES),
        "cedar": study([ends["cedar"]], others),
    }
    outcomes = good(at_once(parts))
    check(outcomes["birch"][0], BATCHES, "amber")
    check(outcomes["cedar"][0], others, "amber")
    service: Service = outcomes["amber"]
    account = outcomes["birch"][1].tutors[0].account
    rows = sum(int(inputs["attention_mask"].sum()) for inputs in BATCHES)
    assert (service.served["birch"].answered, service.served["cedar"].answered) == (12, 7)
    assert (account.asked, account.answered, account.rows, account.losses) == (12, 12, rows, 0)
    assert service.served["birch"].rows == rows
    assert service.served["birch"].bytes_sent == account.bytes_received
    assert account.bytes_per_row == account.bytes_received / rows


def test_one_student_of_two_teachers() -> None:
    one, other = stars("amber", ["cedar"]), stars("birch", ["cedar"])
    parts = {
        "amber": serve(one["amber"]),
        "birch": serve(other["birch"], offer(teacher=OTHER_TEACHER), answer=lambda asked: answer(asked, times=11)),
        "cedar": study([one["cedar"], other["cedar"]], BATCHES),
    }
    told, _ = good(at_once(parts))["cedar"]
    check(told, BATCHES, "amber")
    check(told, BATCHES, "birch", times=11)


def test_both_sides_derive_the_batches() -> None:
    ends, data = stars("amber", ["birch"]), "dd" * 16
    parts = {
        "amber": serve(ends["amber"], offer(data=data), batch_at=lambda position: BATCHES[position - 3]),
        "birch": study([ends["birch"]], BATCHES, wish(data=data), first=3),
    }
    told, client = good(at_once(parts))["birch"]
    check(told, BATCHES, "amber")
    assert client.tutors[0].account.bytes_sent < 12 * 100


def test_a_batch_derived_otherwise_is_an_error_with_both_fingerprints() -> None:
    ends, data = stars("amber", ["birch"]), "dd" * 16
    parts = {
        "amber": serve(ends["amber"], offer(data=data), batch_at=lambda position: BATCHES[position - 1]),
        "birch": study([ends["birch"]], BATCHES, wish(data=data)),
    }
    error = at_once(parts)["birch"]
    here, there = batch_fingerprint(BATCHES[-1]), batch_fingerprint(BATCHES[0])
    assert isinstance(error, NebulaError)
    assert f"the fingerprint {here} here but {there} there" in str(error)
    assert "teacher 'amber' has no answer for batch 0 of student 'birch'" in str(error)


def test_a_second_epoch_asks_nobody(tmp_path: Path) -> None:
    ends = stars("amber", ["birch"])
    parts = {
        "amber": serve(ends["amber"]),
        "birch": study([ends["birch"]], BATCHES + BATCHES[::-1], manners=Manners(cache=tmp_path, ahead=4)),
    }
    outcomes = good(at_once(parts))
    told, client = outcomes["birch"]
    check(told, BATCHES + BATCHES[::-1], "amber")
    account = client.tutors[0].account
    # The last ones of an epoch may be wanted again before their answers have come.
    assert account.asked + account.cached == 24
    assert 12 <= account.asked <= 16
    assert outcomes["amber"].served["birch"].answered == account.asked


@pytest.mark.parametrize(
    ("offered", "wished", "sentence"),
    [
        ({"tokens": 299}, {}, "teacher 'amber' has a tokenizer of 299 tokens but student 'birch' 300: "),
        ({"tokenizer": "ee" * 16}, {}, f"has the tokenizer {'ee' * 16} but student 'birch' {'cc' * 16}: "),
        ({"vocabulary": 5}, {}, "has a vocabulary of 5 but student 'birch' 300: "),
        ({"knowledge": "logits:top8"}, {}, "has distill_knowledge 'logits:top8' but student 'birch' 'labels': "),
        ({}, {"knowledge": "hidden:3/7"}, "has the layers 0 to 6 but student 'birch' asks for 'hidden:3/7': "),
        ({}, {"knowledge": "attention-relations:9"}, "asks for 'attention-relations:9': "),
        ({"generates": 0}, {"knowledge": "sequence"}, "has no generated sequences but student 'birch' asks for"),
        ({"longest": 7}, {}, "has room for samples of 7 tokens but student 'birch' sends up to 8: "),
        ({}, {"data": "dd" * 16}, f"has the data of no batch but student 'birch' has {'dd' * 16}: "),
    ],
)
def test_both_sides_refuse_with_one_sentence(offered: Any, wished: Any, sentence: str) -> None:
    ends = stars("amber", ["birch"])
    parts = {"amber": serve(ends["amber"], offer(**offered)), "birch": study([ends["birch"]], [], wish(**wished))}
    outcomes = at_once(parts)
    assert isinstance(outcomes["birch"], HandshakeError)
    assert sentence in str(outcomes["birch"])
    assert outcomes["amber"].served["birch"].refused == str(outcomes["birch"])


def test_a_refused_student_does_not_keep_the_others_from_learning() -> None:
    ends = stars("amber", ["birch", "cedar"])
    parts = {
        "amber": serve(ends["amber"]),
        "birch": study([ends["birch"]], BATCHES, wish(tokens=5)),
        "cedar": study([ends["cedar"]], BATCHES),
    }
    outcomes = at_once(parts)
    assert isinstance(outcomes["birch"], HandshakeError)
    check(outcomes["cedar"][0], BATCHES, "amber")


def test_an_offer_that_cannot_be_kept_is_found_at_the_start() -> None:
    star = stars("amber", ["birch"])["amber"]
    with pytest.raises(ConfigurationError, match=r"layers 0 to 6 .* asks for 'hidden:7'"):
        Service(star, offer(knowledge="hidden:7"), answer)
    with pytest.raises(ConfigurationError, match="must name its data if, and only if"):
        Service(star, offer(data="dd" * 16), answer)


def test_not_a_number_names_teacher_batch_and_position() -> None:
    def overflows(asked: Batch) -> Any:
        told = answer(asked)
        if "batch 4 " in asked.name:
            told["hidden.3"][2, 5] = np.nan
        return told

    ends = stars("amber", ["birch", "cedar"])
    parts = {
        "amber": serve(ends["amber"], answer=overflows),
        "birch": study([ends["birch"]], BATCHES, wish(knowledge="hidden:3")),
        "cedar": study([ends["cedar"]], BATCHES[:4]),
    }
    outcomes = at_once(parts)
    words = "teacher 'amber' has no answer for batch 4 of student 'birch': 'hidden.3' of hidden:3 must be finite numbers, got nan in row 2"
    assert str(outcomes["birch"]) == words
    assert outcomes["amber"].served["birch"].unanswered == 1
    check(outcomes["cedar"][0], BATCHES[:4], "amber")


def test_an_unexpected_error_of_the_model_ends_the_service_and_is_told() -> None:
    def fails(asked: Batch) -> Any:
        raise ZeroDivisionError("a bug")

    ends = stars("amber", ["birch"])
    manners = Manners(on_loss="pause")
    outcomes = at_once(
        {"amber": serve(ends["amber"], answer=fails), "birch": study([ends["birch"]], BATCHES, manners=manners)}
    )
    assert isinstance(outcomes["amber"], ZeroDivisionError)
    assert isinstance(outcomes["birch"], PeerLost)
    assert "ZeroDivisionError: a bug" in str(outcomes["birch"])


def test_without_its_teacher_a_student_goes_on() -> None:
    count = 0

    def ends_after_five(asked: Batch) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            service.stop("the queue of jobs is closed")
        return answer(asked)

    ends = stars("amber", ["birch"])
    service = Service(ends["amber"], offer(), ends_after_five)
    told, client = good(at_once({"amber": service.serve, "birch": study([ends["birch"]], BATCHES)}))["birch"]
    answers = [each["amber"] for each in told]
    assert [each is not None for each in answers] == [True] * 5 + [False] * 7
    account = client.tutors[0].account
    assert (account.without, account.losses, account.returns) == (7, 1, 0)


def test_a_student_that_fails_does_not_end_the_service() -> None:
    def fails() -> None:
        tutor = Tutor(ends["birch"], wish(), Manners())
        tutor.meet(5)
        for position in range(3):
            tutor.ask(position, BATCHES[position])
        tutor.leave("ZeroDivisionError", deliberate=False)

    ends = stars("amber", ["birch", "cedar"])
    parts = {
        "amber": serve(ends["amber"], answer=lambda asked: answer(asked, seconds=0.02)),
        "birch": fails,
        "cedar": study([ends["cedar"]], BATCHES),
    }
    outcomes = good(at_once(parts))
    check(outcomes["cedar"][0], BATCHES, "amber")
    assert outcomes["amber"].served["birch"].losses == 1


# What does not belong


def questions(link: Link) -> Iterator[Question]:
    """Those of birch, until it is gone."""
    with suppress(PeerLost):
        while True:
            with link.next_message("birch") as message:
                if message is not None and message.frame.kind is Kind.QUESTION:
                    yield Question.parse(message.payload, "birch")
            link.wait(0.05)


def impostor(star: Any, twist: Any) -> Any:
    """A teacher that answers every question as ``twist`` says."""

    def work() -> None:
        link = star.link
        link.post(Kind.HELLO, pack_note(note_of(offer())), to=["birch"])
        for question in questions(link):
            inputs, kinds = question.inputs, wish().kinds
            extent = wish().extent(inputs, offer())
            reply = Answer.to(question.identity, kinds, {"labels": labels(inputs)}, extent)
            link.post(*twist(question.identity, reply), to=["birch"])

    return work


def changed(**changes: Any) -> Any:
    """The answer to another question."""

    def twist(asked: Identity, reply: Answer) -> Any:
        return Kind.ANSWER, Answer(Identity(**{**vars(asked), **changes}), reply.parts).pack()

    return twist


@pytest.mark.parametrize(
    ("twist", "words"),
    [
        (changed(batch="99" * 16), f"must be about batch .*, got batch {'99' * 16}"),
        (changed(tokenizer="99" * 16), f"must be about tokenizer {'cc' * 16}, got tokenizer {'99' * 16}"),
        (changed(teacher="99" * 16), f"must be about teacher {'aa' * 16}, got teacher {'99' * 16}"),
        (changed(knowledge="logits:top8"), "must be about knowledge labels, got knowledge logits:top8"),
        (changed(position=77), "has answered about batch 77, which was not asked"),
        (
            lambda asked, reply: (Kind.ANSWER, Answer(asked, reply.parts * 2).pack()),
            "must have a part for each of labels",
        ),
        (lambda asked, reply: (Kind.ANSWER, Answer(asked, (reply.parts[0][2:],)).pack()), "rows of labels must be"),
        (lambda asked, reply: (Kind.ANSWER, b"nothing"), "must begin with b'NEA1'"),
        (lambda asked, reply: (Kind.BUCKET, b""), "and then answer, got BUCKET"),
    ],
)
def test_an_answer_that_does_not_belong_is_an_error_and_no_label(twist: Any, words: str) -> None:
    ends = stars("amber", ["birch"])
    parts = {"amber": impostor(ends["amber"], twist), "birch": study([ends["birch"]], BATCHES)}
    outcomes = at_once(parts)
    assert not isinstance(outcomes["amber"], BaseException), outcomes["amber"]
    error = outcomes["birch"]
    assert isinstance(error, ProtocolError), error
    with pytest.raises(ProtocolError, match=words):
        raise error


def hostile(star: Any, messages: Any) -> Any:
    """A student that sends these, and is thrown out with the reason returned."""

    def work() -> str:
        link = star.link
        for kind, payload in messages:
            link.post(kind, payload, to=["amber"])
        try:
            while True:
                with link.next_message("amber"):
                    pass
                link.wait(0.05)
        except PeerLost as loss:
            return str(loss)

    return work


def ask(inputs: Any, **changes: Any) -> bytes:
    identity = Identity(0, batch_fingerprint(inputs), "cc" * 16, "aa" * 16, "labels")
    return Question(Identity(**{**vars(identity), **changes}), inputs).pack()


HELLO = (Kind.HELLO, pack_note(note_of(wish())))
BEYOND = {**BATCHES[0], "input_ids": BATCHES[0]["input_ids"] + 300}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([(Kind.QUESTION, ask(BATCHES[0]))], "must say what it wishes, and then ask, got QUESTION"),
        ([HELLO, HELLO], "got HELLO"),
        ([HELLO, (Kind.QUESTION, b"junk")], "must begin with b'NEQ1'"),
        ([HELLO, (Kind.QUESTION, ask(batch(0, length=9)))], "at most 8 tokens"),
        ([HELLO, (Kind.QUESTION, ask(BEYOND))], "input_ids must be from 0 to 299"),
        ([HELLO, (Kind.QUESTION, ask({"input_ids": BATCHES[0]["input_ids"]}))], "must have the input 'attention_mask'"),
        ([HELLO, (Kind.QUESTION, ask(BATCHES[0], teacher="99" * 16))], "must be about teacher"),
        ([HELLO, (Kind.QUESTION, ask({}))], "must send its batches exactly if"),
        ([(Kind.HELLO, b"[]")], "must be a JSON object"),
        ([(Kind.HELLO, pack_note({**note_of(wish()), "longest": -1}))], "must give a proper longest, got -1"),
        ([(Kind.HELLO, pack_note({**note_of(wish()), "longest": True}))], "must give a proper longest, got True"),
        ([(Kind.HELLO, pack_note({**note_of(wish()), "knowledge": "magic"}))], "that student 'birch' wishes is none"),
        ([(Kind.HELLO, pack_note({"longest": 8}))], "must say tokenizer, tokens"),
    ],
)
def test_a_hostile_student_is_thrown_out_and_the_others_learn(messages: Any, words: str) -> None:
    ends = stars("amber", ["birch", "cedar"])
    parts = {
        "amber": serve(ends["amber"]),
        "birch": hostile(ends["birch"], messages),
        "cedar": study([ends["cedar"]], BATCHES),
    }
    outcomes = good(at_once(parts))
    assert words in outcomes["birch"]
    check(outcomes["cedar"][0], BATCHES, "amber")
    assert outcomes["amber"].served["birch"].losses == 1


# Time


def test_no_student_is_answered_twice_while_another_waits() -> None:
    order: list[str] = []

    def slow(asked: Batch) -> Any:
        order.append(asked.name.split("'")[1])
        return answer(asked, seconds=0.02)

    ends = stars("amber", ["birch", "cedar"])
    many = [batch(number) for number in range(20)]
    parts = {
        "amber": serve(ends["amber"], answer=slow),
        "birch": study([ends["birch"]], many, manners=Manners(ahead=16)),
        "cedar": study([ends["cedar"]], many, manners=Manners(ahead=2)),
    }
    good(at_once(parts))
    middle = "".join(name[0] for name in order[4:-8])
    assert "bbb" not in middle, middle
    assert "ccc" not in middle, middle


def test_a_student_that_does_not_read_holds_up_nobody() -> None:
    """Its answers wait in its own chunks and queue; the other's go on."""

    def deaf() -> None:
        link = ends["birch"].link
        for kind, payload in [HELLO] + 16 * [(Kind.QUESTION, ask(BATCHES[0]))]:
            link.post(kind, payload, to=["amber"])
            link.flush()
        while not done:
            time.sleep(0.01)
        link.close()

    def diligent() -> Any:
        found = study([ends["cedar"]], BATCHES)()
        done.append(True)
        return found

    done: list[bool] = []
    ends = stars("amber", ["birch", "cedar"], chunk_bytes=256, chunks=2)
    outcomes = good(at_once({"amber": serve(ends["amber"]), "birch": deaf, "cedar": diligent}))
    check(outcomes["cedar"][0], BATCHES, "amber")
    assert outcomes["amber"].served["birch"].answered < 16


def test_a_slow_teacher_is_named_and_its_student_waits() -> None:
    ends = stars("amber", ["birch"])
    parts = {
        "amber": serve(ends["amber"], answer=lambda asked: answer(asked, seconds=0.05)),
        "birch": study([ends["birch"]], BATCHES),
    }
    _, client = good(at_once(parts))["birch"]
    figures = client.report()["amber"]
    assert figures["limits"] == "teacher"
    assert 0.45 < figures["seconds_waiting"] < 1.5
    assert figures["slowdown"] > 5
    assert figures["seconds_teacher"] == pytest.approx(12 * 0.05, rel=0.3)


def test_a_fast_teacher_keeps_nobody_waiting() -> None:
    ends = stars("amber", ["birch"])
    parts = {"amber": serve(ends["amber"]), "birch": study([ends["birch"]], BATCHES, step_s=0.05)}
    _, client = good(at_once(parts))["birch"]
    figures = client.report()["amber"]
    assert figures["limits"] == "student"
    assert figures["slowdown"] < 1.1


def test_no_more_is_held_than_memory_allows() -> None:
    ends = stars("amber", ["birch"])
    bound = wish().kinds[0].bound(wish().extent(batch(0), offer()))
    biggest = max(wish().kinds[0].bound(wish().extent(each, offer())) for each in BATCHES)
    manners = Manners(memory_mb=2.5e-6 * max(bound, biggest))
    parts = {
        "amber": serve(ends["amber"], answer=lambda asked: answer(asked, seconds=0.01)),
        "birch": study([ends["birch"]], BATCHES, manners=manners),
    }
    told, client = good(at_once(parts))["birch"]
    check(told, BATCHES, "amber")
    assert client.tutors[0].pace.most == 2


def test_who_stops_in_the_middle_can_begin_anew() -> None:
    """What was asked ahead and is not wanted any more does not stand in the way."""

    def fickle() -> Any:
        tutor = Tutor(ends["birch"], wish(), Manners())
        client = Client([tutor])
        client.meet(5)
        for number in range(4):
            rounds = client.accompany(BATCHES, lambda inputs: inputs, first=100 * number)
            told = [next(rounds)[1] for _ in range(3)]
            check(told, BATCHES[:3], "amber")
            rounds.close()
        told = [answers for _, answers in client.accompany(BATCHES, lambda inputs: inputs, first=1000)]
        client.leave("done", deliberate=True)
        return told, tutor

    ends = stars("amber", ["birch"])
    parts = {"amber": serve(ends["amber"], answer=lambda asked: answer(asked, seconds=0.005)), "birch": fickle}
    told, tutor = good(at_once(parts))["birch"]
    check(told, BATCHES, "amber")
    assert tutor.account.asked > 24
    assert not tutor._pending
