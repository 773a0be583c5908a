"""Recipe ``pretrain``: a causal language model from scratch, the text divided between the clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.recipe.device import use_device
from paddlenlp_nebula.recipe.trainers import make_trainer

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["PretrainArguments", "argument_classes", "run"]

_RANGES = {
    "num_hidden_layers": (1, 128),
    "hidden_size": (2, 16384),
    "num_attention_heads": (1, 256),
    "max_seq_length": (8, 65536),
    "eval_blocks": (0, 10**9),
}


@dataclass
class PretrainArguments:
    """What the recipe ``pretrain`` trains, and on what.

    Raises:
        ConfigurationError: with every problem at once, if any field is out of range.
    """

    text: str = field(
        default="libreoffice-help",
        metadata={
            "help": "libreoffice-help: fetched on first use; a small sample of it, and said so, if it cannot be had. "
            "sample: that sample. Else a folder: each .txt file in it is a document."
        },
    )
    num_hidden_layers: int = field(default=3, metadata={"help": "Layers of the Llama model, 1 to 128."})
    hidden_size: int = field(
        default=192, metadata={"help": "Its width, a multiple of 2 x num_attention_heads, up to 16384."}
    )
    num_attention_heads: int = field(default=6, metadata={"help": "Heads of its attention, 1 to 256."})
    max_seq_length: int = field(
        default=128, metadata={"help": "Bytes per block, which is what the model sees at once, 8 to 65536."}
    )
    eval_percent: float = field(
        default=3.0, metadata={"help": "Percentage of the documents held out for evaluation, above 0 and below 100."}
    )
    eval_blocks: int = field(
        default=0, metadata={"help": "Evaluate on the first so many blocks of the documents held out; 0: on all."}
    )
    compare_alone: bool = field(
        default=False,
        metadata={"help": "Afterwards train once more on one cluster's part of the text alone, for comparison."},
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
        if not 0 < self.eval_percent < 100:
            found.append(f"eval_percent must be above 0 and below 100, got {self.eval_percent!r}")
        if not found and self.hidden_size % (2 * self.num_attention_heads):
            found.append(
                "hidden_size must be a multiple of 2 x num_attention_heads, since rotary positions take the parts of a "
                f"head in pairs, got {self.hidden_size} with {self.num_attention_heads} heads"
            )
        return found


def argument_classes() -> tuple[type, ...]:
    """The dataclasses whose fields a recipe file of this kind may set, beside NebulaArguments."""
    from paddlenlp.trainer import TrainingArguments

    return (TrainingArguments, PretrainArguments)


def run(arguments: tuple[Any, ...], nebula: NebulaArguments, alone: bool = False) -> None:
    """Train, evaluate, save and write ``recipe_result.json``.

    Args:
        arguments: one instance per class of ``argument_classes()``, in that order.
        nebula: this cluster and the others.
        alone: train on this cluster's part of the text only, without any link.
    """
    import paddle
    from paddlenlp.trainer import Trainer
    from paddlenlp.utils.log import logger

    from paddlenlp_nebula.recipe.pretrain_data import IGNORED, Blocks, load_corpus, pack, split

    training, pretrain = arguments
    use_device(training.device)
    corpus = load_corpus(pretrain.text)
    if corpus.lacking:
        logger.warning(f"text: only the sample that comes with the package, because: {corpus.lacking}")
    train_documents, held_out = split(corpus.documents, pretrain.eval_percent)
    train = Blocks(pack(train_documents, pretrain.max_seq_length))
    evaluation = pack(held_out, pretrain.max_seq_length)
    # Whole blocks only, so that the mean over blocks is the mean over bytes.
    evaluation = evaluation[(evaluation != IGNORED).all(axis=1)][: pretrain.eval_blocks or None]
    if not len(evaluation):
        raise NebulaError(
            f"expected at least one block of {pretrain.max_seq_length} bytes in the {len(held_out)} documents held out "
            f"of {corpus.title}, got less: raise eval_percent, or lower max_seq_length"
        )

    paddle.seed(training.seed)  # every cluster starts from the same parameters
    model = _make_model(pretrain)
    trainer = make_trainer(Trainer, nebula, alone, train, model=model, args=training, eval_dataset=Blocks(evaluation))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    loss = float(trainer.evaluate()["eval_loss"])
    if not trainer.is_world_process_zero():
        return
    output_dir = Path(training.output_dir)
    saved = output_dir / "model"
    trainer.model.save_pretrained(str(saved))
    parameters = sum(int(parameter.size) for parameter in trainer.model.parameters())
    bits = loss / math.log(2)
    own_bytes = len(trainer.train_dataset) * pretrain.max_seq_length
    result = {
        "rows": [
            ["held-out loss", f"{loss:.4f}"],
            ["bits per byte", f"{bits:.3f}"],
            ["text", corpus.title],
            ["own part of it", f"{own_bytes / 1e6:.2f} MB"],
            ["model", f"Llama, {parameters / 1e6:.2f} M"],
        ],
        "eval_loss": loss,
        "bits_per_byte": bits,  # the end of a document counts as a byte
        "text": corpus.title,
        "text_version": corpus.version,
        "text_lacking": corpus.lacking,
        "parameters": parameters,
        "train_blocks": len(train),
        "own_blocks": len(trainer.train_dataset),
        "eval_blocks": len(evaluation),
        "saved": str(saved),
    }
    (output_dir / "recipe_result.json").write_text(json_text(result), encoding="utf-8")


def _make_model(pretrain: PretrainArguments) -> Any:
    """A Llama over bytes with fresh parameters."""
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    from paddlenlp_nebula.recipe.pretrain_data import END, START, VOCABULARY

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=pretrain.hidden_size,
        intermediate_size=math.ceil(pretrain.hidden_size / 6) * 16,  # 8/3 of the width, as in Llama
        num_hidden_layers=pretrain.num_hidden_layers,
        num_attention_heads=pretrain.num_attention_heads,
        max_position_embeddings=pretrain.max_seq_length,
        seq_length=pretrain.max_seq_length,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
