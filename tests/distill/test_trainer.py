"""DistillTrainer: the same losses as with the teacher in the same process, resumed or not, and with it away."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.utils import unique_name
from paddlenlp.trainer import PdArgumentParser, TrainerCallback, TrainingArguments

from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.distill.arguments import DistillArguments
from paddlenlp_nebula.distill.identity import tokenizer_fingerprint
from paddlenlp_nebula.distill.offer import Offer
from paddlenlp_nebula.distill.service import Batch, Service
from paddlenlp_nebula.distill.trainer import DistillTrainer
from paddlenlp_nebula.errors import ConfigurationError, HandshakeError, NebulaError
from paddlenlp_nebula.link.star import open_star
from tests.link.clusters import at_once

from .test_identity import WORDS, tokenizer

pytestmark = pytest.mark.timeout(100)
VOCABULARY, LENGTH, SAMPLES = len(WORDS), 6, 24
TABLE = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * 2
NUMBERS = itertools.count()


class Sentences(paddle.io.Dataset):
    """Random ids, each its own label."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(index)
        mask = (np.arange(LENGTH) <= draw.integers(1, LENGTH)).astype(np.int64)
        ids = draw.integers(0, VOCABULARY, LENGTH) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask != 0, ids, -100)}


def stacked(samples: Any) -> dict[str, np.ndarray]:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class Student(paddle.nn.Layer):
    """Logits of each position from its id alone, some more of them than there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = paddle.nn.Embedding(VOCABULARY, VOCABULARY + 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        logits = self.table(input_ids)
        return paddle.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Losses(TrainerCallback):
    """Of each step, as logged."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found.append(float(logs["loss"]))


def rows(inputs: Any) -> np.ndarray:
    return inputs["input_ids"][inputs["attention_mask"] != 0]


def soft(ids: np.ndarray, kept: int = VOCABULARY) -> dict[str, Any]:
    """What the teacher tells: its most probable tokens."""
    logits = TABLE[ids].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logs, axis=1)[:, :kept]
    return {
        "ids": order.astype(np.int32),
        "log_probabilities": np.take_along_axis(logs, order, 1).astype(np.float32),
        "log_tail": np.full(len(ids), -80.0, np.float32),
    }


def answer(asked: Batch) -> Any:
    ids = rows(asked.inputs)
    return soft(ids) | {"labels": TABLE[ids].argmax(axis=1).astype(np.int32)}


def trained(
    folder: Path,
    resume: str | None = None,
    answers: Callable[[Batch], Any] = answer,
    teachers: int = 1,
    serving: Callable[[Service], None] = lambda service: None,
    vocabulary: int = VOCABULARY,
    steps: int = 8,
    student: Callable[[], Any] = Student,
    accumulated: int = 1,
    **settings: Any,
) -> tuple[Any, list[Service]]:
    """Train over loopback; the losses of all steps (or what was raised), and the teachers' services."""
    names = [f"teacher-{number}" for number in range(teachers)]
    known = tokenizer(folder / f"words-{next(NUMBERS)}")
    services: list[Service] = []

    def teach(name: str) -> None:
        star = open_star(name, (name, "west"), "loopback", timeout_s=20, report=print)
        prints = {"teacher": "ab" * 16, "tokenizer": tokenizer_fingerprint(known)}
        offer = Offer(
            **prints, tokens=VOCABULARY, vocabulary=vocabulary, knowledge="", width=4, layers=1, longest=LENGTH
        )
        services.append(Service(star, offer, answers))
        serving(services[-1])
        services[-1].serve()

    def learn() -> list[float]:
        distill = {"distill_knowledge": f"logits:top{VOCABULARY},fp16", "distill_longest": LENGTH, **settings}
        distill_args = DistillArguments(
            distill_teachers=",".join(names), distill_rendezvous="loopback", distill_students="west", **distill
        )
        arguments = TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=steps,
            save_strategy="steps",
            save_steps=4 // accumulated,
            logging_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulated,
            learning_rate=0.1,
            disable_tqdm=True,
            device="cpu",
        )
        solo = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
        losses = Losses()
        with unique_name.guard():
            paddle.seed(3)
            trainer = DistillTrainer(
                model=student(),
                args=arguments,
                train_dataset=Sentences(),
                tokenizer=known,
                data_collator=stacked,
                nebula_args=solo,
                distill_args=distill_args,
                callbacks=[losses],
            )
            trainer.train(resume_from_checkpoint=resume)
        return losses.found

    outcomes = at_once({**{name: lambda name=name: teach(name) for name in names}, "west": learn}, timeout_s=25)
    return outcomes["west"], services


def report(folder: Path) -> Any:
    return json.loads((folder / "out" / "nebula_report.json").read_text())


class InProcess(DistillTrainer):
    """The same with the teacher's whole logits at hand."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        own, logits = model(**inputs)
        flat = inputs["attention_mask"].flatten().nonzero().flatten()
        ids = inputs["input_ids"].flatten()[flat]
        student = logits[..., :VOCABULARY].flatten(0, 1)[flat]
        theirs = paddle.nn.functional.log_softmax(paddle.to_tensor(TABLE)[ids])
        ours = paddle.nn.functional.log_softmax(student)
        return 0.25 * own + 0.75 * (theirs.exp() * (theirs - ours)).sum(axis=-1).mean()


def test_the_losses_are_those_with_the_teacher_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = "kl*0.75 + ce*0.25"
    over_the_wire, services = trained(tmp_path, distill_loss=loss)
    figures = report(tmp_path)["distillation"]
    monkeypatch.setattr(DistillTrainer, "compute_loss", InProcess.compute_loss)
    (tmp_path / "other").mkdir()
    in_process, _ = trained(tmp_path / "other", distill_loss=loss)
    assert len(over_the_wire) == 8, over_the_wire
    np.testing.assert_allclose(over_the_wire, in_process, rtol=2e-3)
    assert over_the_wire[-1] < 0.8 * over_the_wire[0]
    (teacher,) = figures.values()
    assert teacher["answered"] >= 8
    assert teacher["without"] == 0
    assert (
        services[0].served["west"].answered >= teacher["answered"]
    )  # it looks ahead, and leaves what comes after the end


@pytest.mark.parametrize("accumulated", [1, 2])
def test_resumed_is_as_never_stopped_and_asks_about_nothing_that_is_skipped(tmp_path: Path, accumulated: int) -> None:
    seen: list[bytes] = []

    def remembers(asked: Batch) -> Any:
        seen.append(asked.inputs["input_ids"].tobytes())
        return answer(asked)

    whole, _ = trained(tmp_path, answers=remembers, accumulated=accumulated)
    assert len(whole) == 8, whole
    first, seen = seen, []
    # Within the first epoch of 6 batches: what comes after it, a cluster alone finds again as PaddleNLP does, or not.
    step = 4 // accumulated
    resume = str(tmp_path / "out" / f"checkpoint-{step}")
    again, _ = trained(tmp_path, answers=remembers, accumulated=accumulated, resume=resume)
    assert len(again) == 8 - step
    assert again[: 6 // accumulated - step] == whole[step : 6 // accumulated]
    assert seen[:2] == first[4:6], "the skipped batches were asked about"


def test_the_same_training_again_comes_from_the_cache(tmp_path: Path) -> None:
    epoch = {"steps": 6, "distill_cache": str(tmp_path / "cache")}  # nobody looks ahead beyond its end
    once, _ = trained(tmp_path, **epoch)
    again, services = trained(tmp_path, **epoch)
    assert again == once
    assert services[0].served["west"].answered == 0
    (teacher,) = report(tmp_path)["distillation"].values()
    assert (teacher["cached"], teacher["asked"]) == (6, 0)


def test_without_the_teacher_the_own_loss_is_minimised(tmp_path: Path) -> None:
    services: list[Service] = []

    def stops(asked: Batch) -> Any:
        services[0].stop("the queue of jobs is closed")
        return answer(asked)

    losses, _ = trained(tmp_path, answers=stops, serving=services.append, distill_loss="kl*100")
    assert len(losses) == 8, losses
    assert losses[0] > 20
    assert max(losses[1:]) < 5
    found = report(tmp_path)
    (teacher,) = found["distillation"].values()
    assert (teacher["without"], teacher["losses"]) == (7, 1)
    assert any("was lost: the queue of jobs is closed" in sentence for sentence in found["degradations"])


def test_of_several_teachers_the_mean_is_taken(tmp_path: Path) -> None:
    one, _ = trained(tmp_path)
    (tmp_path / "two").mkdir()
    two, services = trained(tmp_path / "two", teachers=2)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    assert all(service.served["west"].answered >= 8 for service in services)


def test_the_teachers_labels_take_the_place_of_the_datas(tmp_path: Path) -> None:
    losses, _ = trained(tmp_path, distill_knowledge="labels", distill_loss="ce", steps=1)
    paddle.seed(3)
    with unique_name.guard():
        model = Student()
    every = np.concatenate([rows(Sentences()[index]) for index in range(SAMPLES)])
    logits = model.table(paddle.to_tensor(every))
    mine = float(paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(every)))
    theirs = float(paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(TABLE[every].argmax(axis=1))))
    assert abs(losses[0] - theirs) < abs(losses[0] - mine)


class Classifier(paddle.nn.Layer):
    """Three classes, from the mean of a sample's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=3)
        self.table = paddle.nn.Embedding(VOCABULARY, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        weights = (attention_mask / attention_mask.sum(axis=1, keepdim=True)).unsqueeze(-1)
        logits = (self.table(input_ids) * weights).sum(axis=1)
        return logits.square().mean(), logits


def test_a_classifier_learns_one_row_for_each_sample(tmp_path: Path) -> None:
    def always_the_second(asked: Batch) -> Any:
        rows = asked.extent.rows
        assert rows == len(asked.inputs["input_ids"])
        logs = np.log(np.tile(np.float32([0.8, 0.1, 0.1]), (rows, 1)))
        ids = np.tile(np.int32([1, 0, 2]), (rows, 1))
        return {"ids": ids, "log_probabilities": logs, "log_tail": np.full(rows, -80, np.float32)}

    losses, _ = trained(
        tmp_path,
        answers=always_the_second,
        student=Classifier,
        vocabulary=3,
        steps=24,
        distill_places="samples",
        distill_knowledge="logits:top3,fp16",
        distill_loss="kl",
    )
    assert len(losses) == 24, losses
    assert losses[0] > 0.1
    assert losses[-1] < 0.3 * losses[0]


def test_another_vocabulary_ends_it_before_anything_is_trained(tmp_path: Path) -> None:
    error, services = trained(tmp_path, vocabulary=9)
    assert isinstance(error, HandshakeError)
    assert f"has a vocabulary of 9 but student 'west' {VOCABULARY}" in str(error)
    assert services[0].served["west"].refused == str(error)


def test_a_teacher_without_an_answer_ends_it_with_the_reason(tmp_path: Path) -> None:
    def overflows(asked: Batch) -> Any:
        told = answer(asked)
        told["log_probabilities"][1, 0] = np.nan
        return told

    error, _ = trained(tmp_path, answers=overflows)
    assert isinstance(error, NebulaError)
    assert (
        "has no answer for batch 0 of student 'west': 'log_probabilities' of logits:top14,fp16 must be finite"
        in str(error)
    )


GOOD = {"distill_teachers": "amber", "distill_rendezvous": "loopback", "distill_students": "west"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill_teachers": "amber,amber"}, "must name each teacher once"),
        (
            {"distill_teachers": "amber,birch", "distill_rendezvous": "host:1"},
            "must give each of the 2 distill_teachers",
        ),
        ({"distill_rendezvous": "nowhere"}, "rendezvous must be 'host:port'"),
        ({"distill_rendezvous": "world"}, "must be 'host:port' or 'loopback', got 'world'"),
        ({"distill_students": ""}, "clusters must be names"),
        ({"distill_on_loss": "stop"}, "distill_on_loss must be continue or pause, got 'stop'"),
        ({"distill_ahead": 0}, "distill_ahead must be from 1 to 1024, got 0"),
        ({"distill_memory_mb": float("nan")}, "distill_memory_mb must be from 0.001"),
        ({"distill_places": "mask"}, "distill_places must be 'samples' or one of distill_inputs"),
        (
            {"distill_knowledge": "hidden:3", "distill_loss": "hidden_mse:3=1"},
            "must be logits or labels in DistillTrainer",
        ),
        (
            {"distill_knowledge": "attention-relations:3", "distill_loss": "relations:3=1"},
            "must be made of kl, reverse_kl, jsd and ce in DistillTrainer",
        ),
        ({"distill_knowledge": "labels", "distill_loss": "kl"}, "'labels' must be used by the loss 'ce'"),
        ({"distill_knowledge": "logits:top8,tau=2"}, "must have one temperature"),
        ({"distill_loss": "kl*much"}, "a weight must be"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DistillArguments(**{**GOOD, **changes})
    assert words in str(caught.value)


def test_paddles_parser_takes_the_settings() -> None:
    words = [f"--{name}={value}" for name, value in GOOD.items()] + ["--distill_ahead", "7", "--distill_cache", "here"]
    (found,) = PdArgumentParser((DistillArguments,)).parse_args_into_dataclasses(words)
    assert (found.distill_ahead, found.distill_cache, found.teachers) == (7, "here", {"amber": "loopback"})
