"""Teachers and students as threads of this process: stars over loopback, and a teacher whose answers can be checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays
from paddlenlp_nebula.distill.offer import Inputs, Offer, Wish
from paddlenlp_nebula.distill.service import Batch, Service
from paddlenlp_nebula.distill.tutor import Manners, Tutor
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.star import Star
from paddlenlp_nebula.transport.loopback import loopback_pair

VOCABULARY = 300
TEACHER, OTHER_TEACHER, TOKENIZER = "aa" * 16, "bb" * 16, "cc" * 16


def offer(**changes: Any) -> Offer:
    settings = {"knowledge": "", "width": 16, "layers": 6, "longest": 12, "generates": 5}
    return Offer(
        **{"teacher": TEACHER, "tokenizer": TOKENIZER, "tokens": 300, "vocabulary": 300, **settings, **changes}
    )


def wish(**changes: Any) -> Wish:
    return Wish(
        **{"tokenizer": TOKENIZER, "tokens": 300, "vocabulary": 300, "knowledge": "labels", "longest": 8, **changes}
    )


def batch(number: int, samples: int = 2, length: int = 8) -> dict[str, Any]:
    """A batch of random ids, some of them padding."""
    draw = np.random.default_rng(number)
    mask = np.arange(length) < draw.integers(1, length + 1, (samples, 1))
    ids = draw.integers(0, VOCABULARY, (samples, length))
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)}


def labels(inputs: Inputs, times: int = 7) -> np.ndarray:
    """What a teacher says of each position that counts."""
    ids = inputs["input_ids"][inputs["attention_mask"] != 0]
    return ((times * ids + 3) % VOCABULARY).astype(np.int32)


def answer(asked: Batch, times: int = 7, seconds: float = 0.0) -> Arrays:
    time.sleep(seconds)
    told: Arrays = {"labels": labels(asked.inputs, times)}
    for name in (name for kind in asked.kinds for name in kind.names()):
        if name.startswith("hidden."):
            told[name] = np.ones((asked.extent.rows, asked.extent.width), np.float32)
    return told


def stars(teacher: str, students: Sequence[str], timeout_s: float = 5.0, **shape: int) -> dict[str, Star]:
    """The ends of a star over loopback."""
    roster = (teacher, *students)
    pairs = {student: loopback_pair(teacher, student, **shape) for student in students}
    found = {teacher: Link(teacher, roster, {name: pair[0] for name, pair in pairs.items()}, timeout_s=timeout_s)}
    for student, pair in pairs.items():
        found[student] = Link(student, roster, {teacher: pair[1]}, timeout_s=timeout_s)
    return {name: Star(link, None, print) for name, link in found.items()}


def serve(star: Star, offered: Offer | None = None, **more: Any) -> Callable[[], Service]:
    """A teacher's part: its service, once it has ended."""

    def work() -> Service:
        service = Service(star, offered or offer(), more.pop("answer", answer), **more)
        service.serve()
        return service

    return work


def study(
    found: Iterable[Star],
    batches: Sequence[Inputs],
    wished: Wish | None = None,
    manners: Manners | None = None,
    step_s: float = 0.0,
    first: int = 0,
) -> Callable[[], tuple[list[dict[str, Arrays | None]], Client]]:
    """A student's part: the answers to all batches, in order, and its client."""

    def work() -> tuple[list[dict[str, Arrays | None]], Client]:
        client = Client([Tutor(star, wished or wish(), manners or Manners(), print) for star in found])
        try:
            client.meet(5)
            told = []
            for _, answers in client.accompany(batches, lambda inputs: inputs, first):
                told.append(answers)
                time.sleep(step_s)
        except BaseException as error:
            client.leave(str(error), deliberate=False)
            raise
        client.leave("it has learnt enough", deliberate=True)
        return told, client

    return work
