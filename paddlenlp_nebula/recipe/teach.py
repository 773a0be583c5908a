"""The teacher's part of the recipe ``distill``: it is fine-tuned, and then answers until its student has left."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle
from paddlenlp.data import DataCollatorWithPadding
from paddlenlp.trainer import Trainer
from paddlenlp.transformers import BertForSequenceClassification
from paddlenlp.utils.log import logger

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.distill.arguments import DistillArguments
from paddlenlp_nebula.distill.knowledge.registry import spec_of
from paddlenlp_nebula.distill.model import answer_by, offer_of
from paddlenlp_nebula.distill.service import Served, Service
from paddlenlp_nebula.distill.trainer import identity_of
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.ledger.ledger import REPORT_NAME
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.link.star import open_star
from paddlenlp_nebula.recipe.encoder import Encoder
from paddlenlp_nebula.recipe.sentences import Sentences, score
from paddlenlp_nebula.recipe.solo import SoloReport

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments
    from paddlenlp_nebula.recipe.distill import DistillRecipeArguments

__all__ = ["Watch", "train_and_teach"]

_REPORT_EVERY_S = 1.0


def train_and_teach(
    training: Any,
    recipe: DistillRecipeArguments,
    distill: DistillArguments,
    nebula: NebulaArguments,
    encoder: Encoder,
    sentences: Sentences,
) -> dict[str, Any]:
    """Fine-tune the teacher, or load it, then serve; what there is to be told.

    Raises:
        NebulaError: the student was away for ``distill_timeout_s``.
    """
    output_dir = Path(training.output_dir)
    saved = output_dir / "teacher"
    paddle.seed(training.seed)
    labels = len(sentences.labels)
    if recipe.teacher_from is None:
        model = encoder.make_model(labels)
    else:
        model = BertForSequenceClassification.from_pretrained(recipe.teacher_from)
        if model.config.num_labels != labels:
            raise NebulaError(
                f"the teacher in {recipe.teacher_from} must tell {labels} labels apart, got {model.config.num_labels}"
            )
    own = copy.deepcopy(training)
    own.max_steps, own.learning_rate = recipe.teacher_steps, recipe.teacher_learning_rate
    train, dev = sentences.tokenized(encoder.tokenizer, recipe.max_length)
    trainer = Trainer(
        model=model,
        args=own,
        data_collator=DataCollatorWithPadding(encoder.tokenizer),
        train_dataset=train,
        eval_dataset=dev,
        tokenizer=encoder.tokenizer,
        compute_metrics=score,
        callbacks=[SoloReport(nebula.cluster_name)],
    )
    if recipe.teacher_from is None:
        trainer.train()
        model.save_pretrained(str(saved))
        encoder.tokenizer.save_pretrained(str(saved))
    found = float(trainer.evaluate()["eval_accuracy"])
    served = _teach(model, encoder.tokenizer, distill, nebula, output_dir / REPORT_NAME)
    parameters = sum(int(parameter.size) for parameter in model.parameters())
    return {
        "rows": [
            ["role", "teacher"],
            ["model", encoder.description],
            ["parameters of the model", f"{parameters / 1e6:.1f} M"],
            ["accuracy", f"{found:.3f}"],
            ["answers", f"{served.answered:,}"],
        ],
        "accuracy": found,
        "encoder": encoder.remark,
        "pretrained": encoder.pretrained,
        "parameters": parameters,
        "saved": str(recipe.teacher_from or saved),
        "served": asdict(served),
    }


def _teach(model: Any, tokenizer: Any, distill: DistillArguments, nebula: NebulaArguments, report: Path) -> Served:
    """Answer the student until it says goodbye."""
    degradations: list[str] = []

    def degrade(sentence: str) -> None:
        logger.warning(f"nebula: {sentence}")
        degradations.append(sentence)

    (student,) = distill.students
    (teacher,) = distill.teachers
    # Before the door is open: fingerprints take a moment.
    offer = offer_of(model, tokenizer, longest=distill.distill_longest, knowledge=spec_of(distill.kinds), places="")
    star = open_star(
        teacher,
        (teacher, student),
        distill.distill_rendezvous,
        timeout_s=distill.distill_timeout_s,
        report=degrade,
        say=logger.info,
        identity=None if distill.distill_rendezvous == "loopback" else identity_of(nebula, degrade),
    )
    watch = Watch(report, distill.distill_timeout_s, degradations)
    service = Service(star, offer, answer_by(model, ""), report=degrade, on_tick=lambda: watch.look(service))
    logger.info(f"nebula: teacher {teacher!r} answers at {distill.distill_rendezvous}")
    service.serve()
    watch.write(service, "failed" if watch.missed else "done")
    if watch.missed:
        raise NebulaError(f"student {student!r} must be there, got nothing of it for {distill.distill_timeout_s:g} s")
    return service.served[student]


class Watch:
    """Reports how the service does, and ends it where nobody comes (back).

    Args:
        path: of the report, which goes on with what the training has written there.
        patience_s: how long the student may be away.
        degradations: sentences so far, a list that grows.
        clock: seconds, for tests.

    Attributes:
        missed: whether nobody came (back).
    """

    def __init__(
        self,
        path: Path,
        patience_s: float,
        degradations: list[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.missed = False
        self._clock = clock
        self._path = path
        self._patience_s = patience_s
        self._degradations = degradations
        self._seen = self._written = clock()

    def look(self, service: Service) -> None:
        """Between two answers."""
        now = self._clock()
        if service.present:
            self._seen = now
        elif now - self._seen > self._patience_s:
            self.missed = True
            service.stop("its student has been away too long")
        if now - self._written > _REPORT_EVERY_S:
            self._written = now
            self.write(service, "teaching")

    def write(self, service: Service, status: str) -> None:
        """The report as of now."""
        served = {name: asdict(each) for name, each in service.served.items()}
        report = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        report |= {
            "status": status,
            "bytes_sent": sum(each["bytes_sent"] for each in served.values()),
            "students": served,
            "degradations": self._degradations,
        }
        with replacing(self._path) as partial:
            partial.write_text(json_text(report), encoding="utf-8")
