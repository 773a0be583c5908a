"""Recipe ``translate``: a small T5 from scratch on sentence pairs, which are divided between the clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.recipe.device import use_device
from paddlenlp_nebula.recipe.trainers import make_trainer

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["TranslateArguments", "argument_classes", "run"]

_RANGES = {
    "vocabulary": (64, 256_000),
    "max_length": (4, 512),
    "batch_tokens": (8, 10**6),
    "width": (8, 8192),
    "feed_forward": (8, 65536),
    "heads": (1, 128),
    "encoder_layers": (1, 128),
    "decoder_layers": (1, 128),
    "eval_sentences": (0, 10**9),
}
_EVAL_PARTS = ("dev", "test")


@dataclass
class TranslateArguments:
    """What the recipe ``translate`` trains, and on what.

    Raises:
        ConfigurationError: with every problem at once, if any field is out of range.
    """

    pairs: str = field(
        default="libreoffice-help",
        metadata={
            "help": "libreoffice-help: English-German, fetched on first use; a small sample of it, and said so, if it "
            "cannot be had. sample: that sample. Else a folder with train.tsv, dev.tsv and test.tsv (columns page or "
            "other source, sentence, translation)."
        },
    )
    vocabulary: int = field(
        default=8000,
        metadata={"help": "Subwords of both languages together, 64 to 256000; a small text gives fewer."},
    )
    max_length: int = field(
        default=64, metadata={"help": "Tokens; pairs with a longer side are not trained on, 4 to 512."}
    )
    batch_tokens: int = field(
        default=2048,
        metadata={"help": "Tokens of a batch, both sides and padding included; a batch is one item of the dataset."},
    )
    width: int = field(default=256, metadata={"help": "Of the T5's hidden states, a multiple of heads, 8 to 8192."})
    feed_forward: int = field(default=1024, metadata={"help": "Inner width of its feed-forward blocks, 8 to 65536."})
    heads: int = field(default=4, metadata={"help": "Of each attention, 1 to 128."})
    encoder_layers: int = field(default=3, metadata={"help": "Blocks that read, 1 to 128."})
    decoder_layers: int = field(default=3, metadata={"help": "Blocks that write, 1 to 128."})
    dropout: float = field(default=0.1, metadata={"help": "Share of activations dropped in training, below 1."})
    eval_part: str = field(
        default="dev", metadata={"help": "What is translated at the end: dev, or test for figures to publish."}
    )
    eval_sentences: int = field(default=0, metadata={"help": "Translate the first so many of them; 0: all."})
    compare_alone: bool = field(
        default=False,
        metadata={"help": "Afterwards train once more on one cluster's part of the pairs alone, for comparison."},
    )

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigurationError(problems)

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty when all is well."""
        found = [
            f"{name} must be from {least} to {most}, got {getattr(self, name)!r}"
            for name, (least, most) in _RANGES.items()
            if not least <= getattr(self, name) <= most
        ]
        if not 0 <= self.dropout < 1:
            found.append(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.eval_part not in _EVAL_PARTS:
            found.append(f"eval_part must be {' or '.join(map(repr, _EVAL_PARTS))}, got {self.eval_part!r}")
        if not found and self.width % self.heads:
            found.append(f"width must be a multiple of heads, got {self.width} with {self.heads} heads")
        return found


def argument_classes() -> tuple[type, ...]:
    """The dataclasses whose fields a recipe file of this kind may set, beside NebulaArguments."""
    from paddlenlp.trainer import TrainingArguments

    return (TrainingArguments, TranslateArguments)


def run(arguments: tuple[Any, ...], nebula: NebulaArguments, alone: bool = False) -> None:
    """Train, save, load again, translate, score and write ``recipe_result.json``.

    Args:
        arguments: one instance per class of ``argument_classes()``, in that order.
        nebula: this cluster and the others.
        alone: train on this cluster's part of the pairs only, without any link.
    """
    import paddle
    from paddlenlp.trainer import Trainer
    from paddlenlp.transformers import T5ForConditionalGeneration
    from paddlenlp.utils.log import logger

    from paddlenlp_nebula.data.subwords import build_subwords, load_subwords
    from paddlenlp_nebula.distill.identity import tokenizer_fingerprint
    from paddlenlp_nebula.recipe.translation import Sizes, TokenLoss, load_metrics, make_model, score, translate
    from paddlenlp_nebula.recipe.translation_data import Batches, Collator, load_corpus

    training, wanted = arguments
    use_device(training.device)
    load_metrics()  # what is missing is found before the training, not after it
    corpus = load_corpus(wanted.pairs)
    if corpus.lacking:
        logger.warning(f"pairs: only the sample that comes with the package, because: {corpus.lacking}")
    tokenizer = load_subwords(build_subwords(corpus.texts, wanted.vocabulary))
    train = Batches(corpus.parts["train"], tokenizer, wanted.max_length, wanted.batch_tokens)
    # One pair each: the Trainer takes as many losses as there are items, and would leave out the other pairs'.
    dev = Batches(corpus.parts["dev"], tokenizer, wanted.max_length, batch_tokens=1)

    paddle.seed(training.seed)  # every cluster starts from the same parameters
    sizes = Sizes(
        wanted.width,
        wanted.feed_forward,
        wanted.heads,
        wanted.encoder_layers,
        wanted.decoder_layers,
        wanted.dropout,
    )
    trainer = make_trainer(
        Trainer, nebula, alone, train,
        model=make_model(sizes, tokenizer), args=training, criterion=TokenLoss(), eval_dataset=dev,
        data_collator=Collator(tokenizer.pad_token_id), tokenizer=tokenizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    loss = float(trainer.evaluate()["eval_loss"])
    if not trainer.is_world_process_zero():
        return
    output_dir = Path(training.output_dir)
    saved = output_dir / "model"
    trainer.model.save_pretrained(str(saved))
    tokenizer.save_pretrained(str(saved))
    model = T5ForConditionalGeneration.from_pretrained(str(saved))  # what is scored is what a user will load
    some = corpus.parts[wanted.eval_part][: wanted.eval_sentences or None]
    translations = translate(model, tokenizer, [pair.english for pair in some], max_length=wanted.max_length)
    scores = score(translations, [pair.german for pair in some])
    lines = ("\t".join((pair.english, pair.german, made)) + "\n" for pair, made in zip(some, translations, strict=True))
    (output_dir / "translations.tsv").write_text("".join(lines), encoding="utf-8")
    parameters = sum(int(parameter.size) for parameter in trainer.model.parameters())
    result = {
        "rows": [
            ["sacreBLEU", f"{scores['bleu']:.1f}"],
            ["chrF", f"{scores['chrf']:.1f}"],
            ["loss per token, dev", f"{loss:.4f}"],
            ["pairs", corpus.title],
            ["own part of them", f"{len(trainer.train_dataset):,} of {len(train):,} batches"],
            ["model", f"T5, {parameters / 1e6:.2f} M"],
        ],
        **scores,
        "eval_loss": loss,  # the mean over batches of per_device_eval_batch_size pairs, of their mean over tokens
        "eval_part": wanted.eval_part,
        "eval_sentences": len(some),
        "pairs": corpus.title,
        "pairs_version": corpus.version,
        "pairs_lacking": corpus.lacking,
        "train_pairs": train.rows,
        "train_pairs_too_long": train.left_out,
        "train_batches": len(train),
        "own_batches": len(trainer.train_dataset),
        "vocabulary": len(tokenizer),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "parameters": parameters,
        "saved": str(saved),
    }
    (output_dir / "recipe_result.json").write_text(json_text(result), encoding="utf-8")
