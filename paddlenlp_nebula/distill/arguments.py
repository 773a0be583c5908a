"""DistillArguments: what a student's user sets, flat, in the style of PaddleNLP's TrainingArguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional  # PdArgumentParser cannot read "str | None"

from paddlenlp_nebula.distill.agreement import check_agreement
from paddlenlp_nebula.distill.knowledge.knowledge import Knowledge
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec
from paddlenlp_nebula.distill.losses.spec import Term, terms_from_spec
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.link.addresses import roster_problems

__all__ = ["DistillArguments"]

_RANGES = {
    "distill_pause_s": (0.0, 7 * 86400.0),
    "distill_ahead": (1, 1024),
    "distill_memory_mb": (0.001, 1e6),
    "distill_cache_mb": (1.0, 1e9),
    "distill_longest": (1, 1 << 20),
    "distill_timeout_s": (0.1, 86400.0),
}


@dataclass
class DistillArguments:
    """What a student learns from its teachers, and how it gets it.

    Raises:
        ConfigurationError: with every problem at once, if any field is missing or out of range.
    """

    distill_teachers: str = field(default="", metadata={"help": "The teachers' names, comma-separated."})
    distill_rendezvous: str = field(
        default="", metadata={"help": "host:port of each teacher's door, comma-separated in their order, or loopback."}
    )
    distill_students: str = field(
        default="",
        metadata={"help": "All students' names, comma-separated, in the same order for the teachers and all of them."},
    )
    distill_knowledge: str = field(
        default="logits:top32", metadata={"help": "What a teacher tells: logits:topK[,int8|fp16][,tau=T], or labels."}
    )
    distill_loss: str = field(
        default="kl*0.5 + ce*0.5",
        metadata={"help": "What is minimised: a sum like kl:tau=2*0.7 + ce*0.3, ce being the student's own loss."},
    )
    distill_on_loss: str = field(
        default="continue",
        metadata={
            "help": "While a teacher is away: continue without it (with no teacher left: by the own loss), or pause."
        },
    )
    distill_pause_s: float = field(default=3600.0, metadata={"help": "Longest pause, seconds; after it training ends."})
    distill_inputs: str = field(
        default="input_ids,attention_mask",
        metadata={"help": "What the teachers' models take of a batch, comma-separated."},
    )
    distill_places: str = field(
        default="attention_mask",
        metadata={
            "help": "The input whose positions that are not 0 are learned, or 'samples': one row for each sample."
        },
    )
    distill_longest: int = field(default=512, metadata={"help": "Tokens of a sample at most."})
    distill_ahead: int = field(
        default=32, metadata={"help": "Batches asked about ahead, at most; how many is found from measured times."}
    )
    distill_memory_mb: float = field(default=256.0, metadata={"help": "Of answers held ahead, at most, 10^6 bytes."})
    distill_cache: Optional[str] = field(
        default=None,
        metadata={"help": "Folder on this machine that keeps answers, so that a batch is asked about once."},
    )
    distill_cache_mb: float = field(default=10_000.0, metadata={"help": "Size of it at most, 10^6 bytes."})
    distill_timeout_s: float = field(
        default=600.0, metadata={"help": "Longest search for a teacher, and silence of one that is awaited, seconds."}
    )

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be from {low:g} to {high:g}, got {getattr(self, name)!r}"
            for name, (low, high) in _RANGES.items()
            if not (math.isfinite(getattr(self, name)) and low <= getattr(self, name) <= high)
        ]
        if self.distill_on_loss not in ("continue", "pause"):
            problems.append(f"distill_on_loss must be continue or pause, got {self.distill_on_loss!r}")
        problems += self._roster_problems()
        if self.distill_places != "samples" and self.distill_places not in self.inputs:
            problems.append(
                f"distill_places must be 'samples' or one of distill_inputs ({self.distill_inputs}), got "
                f"{self.distill_places!r}"
            )
        for look in (self._check_losses, self._check_kinds):
            try:
                look()
            except ConfigurationError as error:
                problems += error.problems
        if problems:
            raise ConfigurationError(problems)

    @property
    def teachers(self) -> dict[str, str]:
        """Name -> rendezvous."""
        names, places = self.distill_teachers.split(","), self.distill_rendezvous.split(",")
        return dict(zip(names, places * len(names) if places == ["loopback"] else places, strict=True))

    @property
    def students(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(self.distill_students.split(","))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what is sent."""
        return tuple(self.distill_inputs.split(","))

    @property
    def kinds(self) -> tuple[Knowledge, ...]:
        """Of knowledge."""
        return knowledge_from_spec(self.distill_knowledge)

    @property
    def terms(self) -> tuple[Term, ...]:
        """Of the loss."""
        return terms_from_spec(self.distill_loss)

    def _roster_problems(self) -> list[str]:
        names, places = self.distill_teachers.split(","), self.distill_rendezvous.split(",")
        if places != ["loopback"] and len(places) != len(names):
            return [
                f"distill_rendezvous must give each of the {len(names)} distill_teachers an address, got "
                f"{self.distill_rendezvous!r}"
            ]
        found = []
        for number, name in enumerate(names):
            where = places[0] if places == ["loopback"] else places[number]
            if where == "world":
                found.append("distill_rendezvous must be 'host:port' or 'loopback', got 'world'")
            found += [
                f"for teacher {name!r} with distill_teachers, distill_students and distill_rendezvous: {problem}"
                for problem in roster_problems(name, [name, *self.students], where)
            ]
        if len(set(names)) != len(names):
            found.append(f"distill_teachers must name each teacher once, got {self.distill_teachers!r}")
        return found

    def _check_losses(self) -> None:
        check_agreement(self.terms, self.kinds)
        others = [term.label for term in self.terms if term.needs not in ("logits", "labels")]
        if others:
            raise ConfigurationError(
                [f"distill_loss must be made of kl, reverse_kl, jsd and ce in DistillTrainer, got {others[0]!r}"]
            )

    def _check_kinds(self) -> None:
        """What the Trainer can make use of."""
        families = [kind.spec.partition(":")[0] for kind in self.kinds]
        others = sorted(set(families) - {"logits", "labels"})
        problems = []
        if others:
            problems.append(
                f"distill_knowledge must be logits or labels in DistillTrainer, got {self.distill_knowledge!r}"
            )
        if "labels" in families and not any(term.name == "ce" for term in self.terms):
            problems.append(f"distill_knowledge='labels' must be used by the loss 'ce', got {self.distill_loss!r}")
        if "labels" in families and "," in self.distill_teachers:
            problems.append(f"distill_knowledge='labels' must be that of one teacher, got {self.distill_teachers!r}")
        if problems:
            raise ConfigurationError(problems)
