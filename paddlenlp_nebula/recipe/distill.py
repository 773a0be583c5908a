"""Recipe ``distill``: a classifier of sentences on one cluster teaches a smaller one on another."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional  # PdArgumentParser cannot read "str | None"

from paddlenlp_nebula.distill.arguments import DistillArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.recipe.device import use_device
from paddlenlp_nebula.recipe.encoder import Encoder, load_encoder, small_bert
from paddlenlp_nebula.recipe.sentences import Sentences, read_sentences, score
from paddlenlp_nebula.recipe.solo import SoloReport

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["DistillRecipeArguments", "LearningArguments", "argument_classes", "problems", "run"]

_MODELS = ("minilm-l6", "scratch")
_ROLES = (None, "teacher", "student")
_RANGES = {
    "teacher_steps": (1, 10**9),
    "student_layers": (1, 24),
    "student_width": (4, 4096),
    "max_length": (4, 512),
    "eval_sentences": (0, 10**9),
}


@dataclass
class DistillRecipeArguments:
    """Who teaches whom in the recipe ``distill``, and what.

    Raises:
        ConfigurationError: with every problem at once, if any field is out of range.
    """

    role: Optional[str] = field(
        default=None,
        metadata={
            "help": "What this cluster is: teacher or student. By default the first of the clusters is the teacher; "
            "`nebula run --role` makes sure of it."
        },
    )
    data_dir: str = field(
        default="libreoffice_help_sections",
        metadata={
            "help": "A folder with train.tsv and dev.tsv (columns label, page or other source, text), or the name of a "
            "sample that comes with the package."
        },
    )
    teacher: str = field(
        default="minilm-l6",
        metadata={
            "help": "minilm-l6: pre-trained; from scratch, and said so, if it cannot be had. scratch: small BERT."
        },
    )
    teacher_from: Optional[str] = field(
        default=None,
        metadata={"help": "Folder of a teacher that an earlier run has saved, which is not trained again."},
    )
    teacher_steps: int = field(default=150, metadata={"help": "Optimizer steps of the teacher before it teaches."})
    teacher_learning_rate: float = field(default=2e-4, metadata={"help": "Highest learning rate of the teacher."})
    student_layers: int = field(default=2, metadata={"help": "Layers of the student, a BERT from scratch, 1 to 24."})
    student_width: int = field(
        default=128, metadata={"help": "Width of the student's hidden states, a multiple of 4, 4 to 4096."}
    )
    max_length: int = field(default=48, metadata={"help": "Longer sentences are cut to this many tokens, 4 to 512."})
    eval_sentences: int = field(default=0, metadata={"help": "Evaluate on the first so many of dev.tsv; 0: on all."})
    compare_alone: bool = field(
        default=False,
        metadata={"help": "Afterwards train the same student once more without a teacher, for comparison."},
    )

    def __post_init__(self) -> None:
        found = [
            f"{name} must be from {least} to {most}, got {getattr(self, name)!r}"
            for name, (least, most) in _RANGES.items()
            if not least <= getattr(self, name) <= most
        ]
        if self.student_width % 4:
            found.append(f"student_width must be a multiple of its 4 heads, got {self.student_width}")
        if not 0 < self.teacher_learning_rate < 1:
            found.append(f"teacher_learning_rate must be between 0 and 1, got {self.teacher_learning_rate!r}")
        if self.teacher not in _MODELS:
            found.append(f"teacher must be {' or '.join(map(repr, _MODELS))}, got {self.teacher!r}")
        if self.role not in _ROLES:
            found.append(f"role must be 'teacher', 'student' or not set, got {self.role!r}")
        if self.teacher_from is not None and not (Path(self.teacher_from) / "model_state.pdparams").is_file():
            found.append(f"teacher_from must be a folder with a model_state.pdparams, got {self.teacher_from!r}")
        if found:
            raise ConfigurationError(found)


@dataclass
class LearningArguments(DistillArguments):
    """DistillArguments but for what the recipe knows itself: who, where, and about what."""

    distill_teachers: str = field(default="teacher", init=False)
    distill_rendezvous: str = field(default="loopback", init=False)
    distill_students: str = field(default="student", init=False)
    distill_inputs: str = field(default="input_ids", init=False)
    distill_places: str = field(default="samples", init=False)
    distill_longest: int = field(default=512, init=False)

    def between(self, teacher: str, student: str, door: str, longest: int) -> DistillArguments:
        """All of DistillArguments."""
        known = {
            "distill_teachers": teacher,
            "distill_students": student,
            "distill_rendezvous": door,
            "distill_longest": longest,
        }
        own = {each.name: getattr(self, each.name) for each in fields(DistillArguments)}
        return DistillArguments(**{**own, **known})


def argument_classes() -> tuple[type, ...]:
    """The dataclasses whose fields a recipe file of this kind may set, beside NebulaArguments."""
    from paddlenlp.trainer import TrainingArguments

    return (TrainingArguments, DistillRecipeArguments, LearningArguments)


def problems(arguments: tuple[Any, ...], nebula: NebulaArguments) -> list[str]:
    """What does not go together: a sentence each."""
    training, recipe, _ = arguments
    names, found = nebula.cluster_names, []
    if len(names) != 2:
        found.append(f"clusters must be a teacher and a student, got {len(names)}: {', '.join(names)}")
    if recipe.role is not None and (recipe.role == "teacher") != (nebula.cluster_index == 0):
        found.append(
            f"role must be that of the place among the clusters, the teacher first, got {recipe.role!r} for "
            f"{nebula.cluster!r} of {', '.join(names)}"
        )
    if nebula.rendezvous == "world":
        found.append("rendezvous must be the address of the teacher's door, got 'world'")
    if training.world_size > 1:
        found.append(f"teacher and student must be one process each, got {training.world_size}")
    return found


def run(arguments: tuple[Any, ...], nebula: NebulaArguments, alone: bool = False) -> None:
    """Teach or learn, evaluate, save and write ``recipe_result.json``.

    Args:
        arguments: one instance per class of ``argument_classes()``, in that order.
        nebula: this cluster and the other.
        alone: train the student without a teacher, whichever cluster this is.
    """
    from paddlenlp.utils.log import logger

    from paddlenlp_nebula.recipe.teach import train_and_teach

    if found := problems(arguments, nebula):
        raise ConfigurationError(found)
    training, recipe, learning = arguments
    use_device(training.device)
    sentences = read_sentences(recipe.data_dir, recipe.eval_sentences)
    texts = [example.text for example in sentences.train]
    encoder = load_encoder(recipe.teacher, texts, Path(training.output_dir) / "vocabulary")
    (logger.info if encoder.pretrained else logger.warning)(f"teacher's encoder: {encoder.remark}")
    names, door = nebula.cluster_names, str(nebula.rendezvous).split(",")[0]
    settings = learning.between(names[0], names[1], door, recipe.max_length)
    if nebula.cluster_index == 0 and not alone:
        result = train_and_teach(training, recipe, settings, nebula, encoder, sentences)
    else:
        result = _learn(training, recipe, None if alone else settings, nebula, encoder, sentences)
    result["majority"] = sentences.majority
    result["rows"].append(["majority class", f"{sentences.majority:.3f}"])
    (Path(training.output_dir) / "recipe_result.json").write_text(json_text(result), encoding="utf-8")


def _learn(
    training: Any,
    recipe: DistillRecipeArguments,
    distill: DistillArguments | None,
    nebula: NebulaArguments,
    encoder: Encoder,
    sentences: Sentences,
) -> dict[str, Any]:
    """Train the student, without a teacher if ``distill`` is None; what there is to be told."""
    import paddle
    from paddlenlp.data import DataCollatorWithPadding
    from paddlenlp.trainer import Trainer

    from paddlenlp_nebula.distill.trainer import DistillTrainer

    paddle.seed(training.seed)  # with and without a teacher it starts from the same weights
    train, dev = sentences.tokenized(encoder.tokenizer, recipe.max_length)
    model = small_bert(len(encoder.tokenizer), len(sentences.labels), recipe.student_layers, recipe.student_width)
    common = {
        "model": model,
        "args": training,
        "data_collator": DataCollatorWithPadding(encoder.tokenizer),
        "train_dataset": train,
        "eval_dataset": dev,
        "tokenizer": encoder.tokenizer,
        "compute_metrics": score,
    }
    if distill is None:
        trainer = Trainer(callbacks=[SoloReport(nebula.cluster_name)], **common)
    else:
        # Of its own run a student is the only cluster: it averages with nobody.
        own = replace(nebula, clusters=nebula.cluster_name, rendezvous=distill.distill_rendezvous)
        trainer = DistillTrainer(nebula_args=own, distill_args=distill, **common)
    seconds = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics["train_runtime"]
    found = float(trainer.evaluate()["eval_accuracy"])
    saved = Path(training.output_dir) / "model"
    trainer.model.save_pretrained(str(saved))
    encoder.tokenizer.save_pretrained(str(saved))
    parameters = sum(int(parameter.size) for parameter in model.parameters())
    result: dict[str, Any] = {
        "rows": [
            ["role", "student" if distill else "student without a teacher"],
            ["model", f"BERT from scratch, {recipe.student_layers} layers"],
            ["parameters of the model", f"{parameters / 1e6:.1f} M"],
            ["accuracy", f"{found:.3f}"],
        ],
        "accuracy": found,
        "parameters": parameters,
        "saved": str(saved),
    }
    if distill is not None:
        (teacher,) = trainer.nebula_callback.ledger.facts["distillation"].values()
        result |= _way(teacher, seconds)
        result["rows"] += [
            ["bytes for each sentence, of an answer", f"{result['answer_bytes_per_sentence']:.1f}"],
            ["bytes for each sentence, of a question", f"{result['question_bytes_per_sentence']:.1f}"],
            ["waiting for the teacher", f"{result['teacher_wait_share']:.1%}"],
            ["limited by", f"{result['limits']} ({result['slowdown']:.2f} x the student's own time)"],
        ]
    return result


def _way(teacher: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the way to the teacher has cost, from the Trainer's figures for it."""
    rows = max(1, teacher["rows"])
    return {
        "answer_bytes_per_sentence": teacher["bytes_received"] / rows,
        "question_bytes_per_sentence": teacher["bytes_sent"] / rows,
        "teacher_wait_share": (teacher["seconds_waiting"] + teacher["seconds_paused"]) / seconds,
        "batches_without_teacher": teacher["without"],
        "limits": teacher["limits"],
        "slowdown": teacher["slowdown"],
    }
