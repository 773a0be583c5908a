"""DistillTrainer: a student that learns from teachers on other clusters, and trains with other students if there are any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader
from paddlenlp.trainer.trainer_utils import has_length
from paddlenlp.utils.log import logger

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.distill.arguments import DistillArguments
from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.identity import tokenizer_fingerprint
from paddlenlp_nebula.distill.loader import AccompaniedLoader
from paddlenlp_nebula.distill.losses.divergence import IGNORED
from paddlenlp_nebula.distill.losses.objective import Objective
from paddlenlp_nebula.distill.offer import Wish
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.targets import targets
from paddlenlp_nebula.distill.tutor import Manners, Tutor
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.link.star import open_star
from paddlenlp_nebula.security.check import open_identity
from paddlenlp_nebula.security.identity import Credentials, Identity
from paddlenlp_nebula.tensors import Tensor
from paddlenlp_nebula.trainer import NebulaTrainer

__all__ = ["DistillTrainer", "identity_of"]


class DistillTrainer(NebulaTrainer):
    """A NebulaTrainer whose loss is that of `DistillArguments`.

    The model gives its own loss and its logits, in this order, as PaddleNLP's models do that are given labels. Several
    teachers count alike: the mean over those that are there. Where none is there (``distill_on_loss=continue``) the own
    loss is minimised. An evaluation is that of the student alone.

    Args:
        distill_args: the settings.
        *args, **kwargs: as for `NebulaTrainer`; a tokenizer must be among them, and security is that of ``nebula_args``.

    Raises:
        ConfigurationError: the settings are wrong, or do not go together with the others.
    """

    def __init__(self, *args: Any, distill_args: DistillArguments, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.distill_args = distill_args
        problems = []
        if self.tokenizer is None:
            problems.append(
                "DistillTrainer must be given the tokenizer, which is compared with the teachers', got None"
            )
        if self.args.world_size > 1:
            problems.append(
                f"a student of DistillTrainer must be a cluster of one process, got {self.args.world_size}: make each a "
                "cluster of its own"
            )
        if self.nebula_args.cluster_name not in distill_args.students:
            problems.append(
                f"distill_students must name this cluster, {self.nebula_args.cluster_name!r}, got "
                f"{distill_args.distill_students!r}"
            )
        if problems:
            raise ConfigurationError(problems)
        self._kinds = distill_args.kinds
        self._own = [term.weight for term in distill_args.terms if term.needs == "labels"]
        self._objective = Objective([term for term in distill_args.terms if term.needs != "labels"])
        self._client = Client([])
        self._loader: AccompaniedLoader | None = None
        self._first_epoch = True

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Meet the teachers, and train; see `NebulaTrainer.train`.

        Raises:
            HandshakeError: a teacher does not offer what is wished for.
            NebulaError: a teacher is not there, has no answer to a batch, or (``distill_on_loss=pause``) stays away.
            ProtocolError: an answer is not that to its question.
        """
        self._client, self._first_epoch = Client([]), True
        try:
            self._meet()
            result = super().train(resume_from_checkpoint, **kwargs)
        except BaseException as error:
            self._client.leave(f"{type(error).__name__}: {error}", deliberate=False)
            raise
        self._client.leave("its training is complete", deliberate=True)
        return result

    def get_train_dataloader(self) -> Any:
        """The Trainer's, accompanied by the teachers' answers."""
        loader = super().get_train_dataloader()
        if type(loader) is not DataLoader:
            raise ConfigurationError([f"DistillTrainer needs Paddle's own DataLoader, got {type(loader).__name__}"])
        self._loader = AccompaniedLoader(loader, self._client, self.distill_args.inputs, lambda: self._start(loader))
        return self._loader

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        """The loss of ``distill_loss`` for a batch that is trained on, else the model's own."""
        loader = self._loader
        if not model.training or loader is None:
            return super().compute_loss(model, inputs, return_outputs)
        if loader.inputs is None:
            raise NebulaError(
                "a batch is trained on that the Trainer was to skip: is ignore_data_skip set differently?"
            )
        mask = loader.inputs.get(self.distill_args.distill_places)
        samples = len(next(iter(loader.inputs.values())))
        places = Places.of(np.ones(samples) if mask is None else mask)
        found = [targets(arrays, self._kinds) for arrays in loader.answers.values() if arrays is not None]
        if found and "labels" in found[0]:
            inputs = {**inputs, "labels": _spread(found[0]["labels"], places)}
        own, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = own if not found else self._combined(own, _logits(outputs), found, places)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], **kwargs: Any) -> None:
        """And how the teachers do, in the log and in ``nebula_report.json``."""
        if self._client.tutors:
            self.nebula_callback.ledger.facts["distillation"] = self._client.report()
            accounts = [tutor.account for tutor in self._client.tutors]
            if "loss" in logs:
                logs["distill_waiting_s"] = round(sum(a.seconds_waiting + a.seconds_paused for a in accounts), 3)
                logs["distill_without"] = sum(account.without for account in accounts)
        super().log(logs, **kwargs)

    # Inside

    def _combined(self, own: Tensor, logits: Tensor, found: list[dict[str, Any]], places: Places) -> Tensor:
        progress = self.state.global_step / max(1, self.state.max_steps)
        loss = sum((weight.at(progress) * own for weight in self._own), start=paddle.zeros([], dtype="float32"))
        if self._objective.terms:
            student = {"logits": logits[..., : self._vocabulary]}
            losses = [self._objective(student, teacher, places, None, progress)[0] for teacher in found]
            loss = loss + sum(losses[1:], losses[0]) / len(losses)
        return loss

    @property
    def _vocabulary(self) -> int:
        """Tokens that a logit stands for each, or classes."""
        if self.distill_args.distill_places != "samples":
            return len(self.tokenizer)
        return int(self.model.config.num_labels)

    def _start(self, loader: Any) -> tuple[int, int]:
        """See `AccompaniedLoader`; the Trainer skips in the first epoch that it goes through."""
        if not has_length(loader):
            if self.state.global_step and self._first_epoch and not self.args.ignore_data_skip:
                raise ConfigurationError(["DistillTrainer resumes with a dataset of known length only"])
            return self.state.global_step * self.args.gradient_accumulation_steps, 0
        accumulated = self.args.gradient_accumulation_steps
        epoch, steps = divmod(self.state.global_step, max(1, len(loader) // accumulated))
        skipped = steps * accumulated if self._first_epoch and not self.args.ignore_data_skip else 0
        self._first_epoch = False
        return epoch * len(loader), skipped

    def _meet(self) -> None:
        """Find all teachers, and agree with them."""
        settings, cluster = self.distill_args, self.nebula_args.cluster_name
        wish = Wish(
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            tokens=len(self.tokenizer),
            vocabulary=self._vocabulary,
            knowledge="+".join(kind.spec for kind in self._kinds),
            longest=settings.distill_longest,
            places="" if settings.distill_places == "samples" else settings.distill_places,
        )
        tutors: list[Tutor] = []
        for teacher, where in settings.teachers.items():
            cache = None if settings.distill_cache is None else Path(settings.distill_cache) / teacher
            manners = Manners(
                on_loss=settings.distill_on_loss,
                pause_s=settings.distill_pause_s,
                ahead=settings.distill_ahead,
                memory_mb=settings.distill_memory_mb,
                cache=cache,
                cache_mb=settings.distill_cache_mb,
            )
            star = open_star(
                cluster,
                (teacher, *settings.students),
                where,
                timeout_s=settings.distill_timeout_s,
                report=self._degrade,
                say=logger.info,
                identity=identity_of(self.nebula_args, self._degrade) if where != "loopback" else None,
            )
            tutors.append(Tutor(star, wish, manners, self._degrade))
            self._client = Client(tutors)
        self._client.meet(settings.distill_timeout_s)

    def _degrade(self, sentence: str) -> None:
        """Say it in the log and in the report."""
        logger.warning(f"nebula: {sentence}")
        self.nebula_callback.ledger.degrade(sentence)


def identity_of(nebula: NebulaArguments, note: Callable[[str], None]) -> Identity | None:
    """This cluster's files for TLS; None where links are plain.

    Args:
        nebula: names them.
        note: told, in a sentence, of what will soon be out of order.

    Raises:
        SecurityError: something is not in order.
    """
    if nebula.sync_security != "tls":
        return None
    # Couriers have another working directory.
    files = (str(Path(str(path)).absolute()) for path in (nebula.tls_ca, nebula.tls_cert, nebula.tls_key))
    return open_identity(Credentials(nebula.cluster_name, *files), nebula.tls_key_passphrase_file, note)


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, dict) and "logits" in outputs:
        return outputs["logits"]
    if isinstance(outputs, tuple) and len(outputs) > 1:
        return outputs[1]
    raise NebulaError(f"the student's model must give a loss and logits, got {type(outputs).__name__}: give it labels")


def _spread(labels: Tensor, places: Places) -> Tensor:
    """Labels of rows at their places; no label elsewhere."""
    whole = np.full(places.mask.size, IGNORED, dtype=np.int64)
    whole[places.flat] = labels.numpy()
    return paddle.to_tensor(whole.reshape(places.mask.shape))
