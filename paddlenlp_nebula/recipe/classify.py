"""Recipe ``classify``: fine-tune a sentence classifier with LoRA, the training set divided between the clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.recipe.device import use_device
from paddlenlp_nebula.recipe.encoder import Encoder, load_encoder
from paddlenlp_nebula.recipe.sentences import read_sentences, score
from paddlenlp_nebula.recipe.trainers import make_trainer

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["ClassifyArguments", "argument_classes", "run"]

_MODELS = ("minilm-l6", "scratch")
_RANGES = {"lora_rank": (1, 256), "lora_alpha": (1, 1024), "max_length": (4, 512), "eval_sentences": (0, 10**9)}
_LORA_TARGETS = [".*q_proj.*", ".*v_proj.*"]
_HEAD = ".*classifier.*"


@dataclass
class ClassifyArguments:
    """What the recipe ``classify`` trains, and on what.

    Raises:
        ConfigurationError: with every problem at once, if any field is out of range.
    """

    data_dir: str = field(
        default="libreoffice_help_sections",
        metadata={
            "help": "A folder with train.tsv and dev.tsv (columns label, page or other source, text), or the name of a "
            "sample that comes with the package."
        },
    )
    model: str = field(
        default="minilm-l6",
        metadata={
            "help": "minilm-l6: pre-trained; from scratch, and said so, if it cannot be had. scratch: small BERT."
        },
    )
    lora: bool = field(
        default=True, metadata={"help": "Train LoRA adapters and the head only; otherwise the whole model."}
    )
    lora_rank: int = field(default=8, metadata={"help": "Rank of the adapters, 1 to 256."})
    lora_alpha: int = field(default=16, metadata={"help": "Adapters are scaled by lora_alpha / lora_rank, 1 to 1024."})
    max_length: int = field(default=48, metadata={"help": "Longer sentences are cut to this many tokens, 4 to 512."})
    eval_sentences: int = field(default=0, metadata={"help": "Evaluate on the first so many of dev.tsv; 0: on all."})
    compare_alone: bool = field(
        default=False,
        metadata={"help": "Afterwards train once more on one cluster's part of the data alone, for comparison."},
    )

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigurationError(problems)

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty when all is well."""
        found = []
        if self.model not in _MODELS:
            found.append(f"model must be {' or '.join(map(repr, _MODELS))}, got {self.model!r}")
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                found.append(f"{name} must be from {least} to {most}, got {getattr(self, name)!r}")
        return found


def argument_classes() -> tuple[type, ...]:
    """The dataclasses whose fields a recipe file of this kind may set, beside NebulaArguments."""
    from paddlenlp.trainer import TrainingArguments

    return (TrainingArguments, ClassifyArguments)


def run(arguments: tuple[Any, ...], nebula: NebulaArguments, alone: bool = False) -> None:
    """Train, evaluate, save, reload and write ``recipe_result.json``.

    Args:
        arguments: one instance per class of ``argument_classes()``, in that order.
        nebula: this cluster and the others.
        alone: train on this cluster's part of the data only, without any link.
    """
    import paddle
    from paddlenlp.utils.log import logger

    training, classify = arguments
    use_device(training.device)
    sentences = read_sentences(classify.data_dir, classify.eval_sentences)
    labels = sentences.labels
    output_dir = Path(training.output_dir)
    encoder = load_encoder(classify.model, [example.text for example in sentences.train], output_dir / "vocabulary")
    (logger.info if encoder.pretrained else logger.warning)(f"encoder: {encoder.remark}")
    paddle.seed(training.seed)  # every cluster starts from the same head and adapters
    model = _with_adapters(encoder, len(labels), classify)
    trainer = _make_trainer(
        model, training, nebula, alone, encoder.tokenizer,
        *sentences.tokenized(encoder.tokenizer, classify.max_length),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    accuracy = float(trainer.evaluate()["eval_accuracy"])
    if not trainer.is_world_process_zero():
        return
    saved = output_dir / ("adapter" if classify.lora else "model")
    trainer.model.save_pretrained(str(saved))
    encoder.tokenizer.save_pretrained(str(saved))
    _check_reload(saved, trainer, encoder, len(labels), classify)
    sizes = [(int(parameter.size), parameter.stop_gradient) for parameter in trainer.model.parameters()]
    result = {
        "rows": [
            ["accuracy", f"{accuracy:.3f}"],
            ["majority class", f"{sentences.majority:.3f}"],
            ["encoder", encoder.description],
            ["training sentences", f"{len(trainer.train_dataset):,}"],
            [f"{saved.name}, reloaded", "same predictions"],
        ],
        "accuracy": accuracy,
        "majority": sentences.majority,
        "encoder": encoder.remark,
        "pretrained": encoder.pretrained,
        "saved": str(saved),
        "parameters": sum(size for size, _ in sizes),
        "parameters_trained": sum(size for size, frozen in sizes if not frozen),
        "labels": list(labels),
    }
    (output_dir / "recipe_result.json").write_text(json_text(result), encoding="utf-8")


def _with_adapters(encoder: Encoder, labels: int, classify: ClassifyArguments) -> Any:
    """The classifier, wrapped in LoRA if asked for, with the right parameters trainable."""
    from paddlenlp.peft import LoRAConfig, LoRAModel

    model = encoder.make_model(labels)
    if not classify.lora:
        return model
    config = LoRAConfig(
        target_modules=_LORA_TARGETS,
        # Nothing is worth freezing in a model from scratch: there the "adapter" holds everything.
        trainable_modules=[_HEAD] if encoder.pretrained else [".*"],
        r=classify.lora_rank,
        lora_alpha=classify.lora_alpha,
    )
    adapted = LoRAModel(model, config)
    adapted.mark_only_lora_as_trainable()
    return adapted


def _make_trainer(
    model: Any, training: Any, nebula: NebulaArguments, alone: bool, tokenizer: Any, train: Any, dev: Any
) -> Any:
    from paddlenlp.data import DataCollatorWithPadding
    from paddlenlp.trainer import Trainer

    return make_trainer(
        Trainer, nebula, alone, train,
        model=model, args=training, data_collator=DataCollatorWithPadding(tokenizer), eval_dataset=dev,
        tokenizer=tokenizer, compute_metrics=score,
    )  # fmt: skip


def _check_reload(saved: Path, trainer: Any, encoder: Encoder, labels: int, classify: ClassifyArguments) -> None:
    """Load what was saved as a user would, and compare predictions.

    Raises:
        NebulaError: if a prediction differs.
    """
    import numpy as np
    import paddle
    from paddlenlp.peft import LoRAModel

    if classify.lora:
        reloaded = LoRAModel.from_pretrained(encoder.make_model(labels), str(saved))
    else:
        from paddlenlp.transformers import BertForSequenceClassification

        reloaded = BertForSequenceClassification.from_pretrained(str(saved))
    some = [trainer.eval_dataset[index] for index in range(min(32, len(trainer.eval_dataset)))]
    batch = {name: value for name, value in trainer.data_collator(some).items() if name != "labels"}
    logits = []
    for model in (trainer.model, reloaded):
        model.eval()
        with paddle.no_grad():
            output = model(**batch)
            logits.append((output[0] if isinstance(output, tuple) else output).numpy())
    if not np.allclose(logits[0], logits[1], rtol=0, atol=1e-4):
        raise NebulaError(
            f"expected the model saved in {saved} to predict what the trained one does, got logits that differ by up "
            f"to {np.abs(logits[0] - logits[1]).max():.2g}: do not use it"
        )
