"""Recipe ``sft``: supervised fine-tuning from a PaddleNLP user's own flat JSON file (``lora_argument.json`` style)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.recipe.device import use_device
from paddlenlp_nebula.recipe.sft_data import make_dataset
from paddlenlp_nebula.recipe.sft_model import add_adapters, load_model, load_tokenizer
from paddlenlp_nebula.recipe.trainers import make_trainer

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["argument_classes", "run"]


def argument_classes() -> tuple[type, ...]:
    """The dataclasses whose fields a recipe file of this kind may set, beside NebulaArguments."""
    from paddlenlp_nebula.recipe.sft_arguments import SftDataConfig, SftModelConfig, SftTrainingArguments

    return (SftModelConfig, SftDataConfig, SftTrainingArguments)


def run(arguments: tuple[Any, ...], nebula: NebulaArguments, alone: bool = False) -> None:
    """Fine-tune and save as PaddleNLP's ``run_finetune.py`` does, together with the other clusters.

    Args:
        arguments: one instance per class of ``argument_classes()``, in that order.
        nebula: this cluster and the others.
        alone: train on this cluster's part of the data only, without any link.
    """
    from paddlenlp.trainer import get_last_checkpoint, set_seed
    from paddlenlp.utils.log import logger

    model_args, data_args, training = arguments
    use_device(training.device)
    set_seed(seed=training.seed)  # every cluster starts from the same adapters
    tokenizer = load_tokenizer(model_args, data_args)
    folder = Path(data_args.dataset_name_or_path)
    train = make_dataset(folder / "train.json", tokenizer, data_args) if training.do_train else None
    dev = make_dataset(folder / "dev.json", tokenizer, data_args) if training.do_eval else None
    model = add_adapters(load_model(model_args, data_args, training), model_args, training)
    trainer = _make_trainer(model, tokenizer, train, dev, data_args, training, nebula, alone)

    result: dict[str, Any] = {"rows": []}
    if training.do_train:
        checkpoint = training.resume_from_checkpoint
        if checkpoint is None and Path(training.output_dir).is_dir() and not training.overwrite_output_dir:
            checkpoint = get_last_checkpoint(training.output_dir)
        if checkpoint is not None:  # of a finished run nothing is left to do, which must not look like training
            logger.info(f"nebula: resuming from {checkpoint}; overwrite_output_dir: true would start anew")
            result["rows"] += [["resumed from", Path(checkpoint).name]]
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        trainer.save_model(merge_tensor_parallel=training.tensor_parallel_degree > 1)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        result |= {"train_loss": metrics["train_loss"]}
    if training.do_eval:
        metrics = trainer.evaluate(dev)
        trainer.log_metrics("eval", metrics)
        result |= {"accuracy": metrics["eval_accuracy"], "eval_loss": metrics["eval_loss"]}
        result["rows"] += [["next-token accuracy", f"{metrics['eval_accuracy']:.3f}"]]
    if trainer.is_world_process_zero():
        result_file = Path(training.output_dir) / "recipe_result.json"
        result_file.write_text(json_text(result), encoding="utf-8")


def _make_trainer(
    model: Any,
    tokenizer: Any,
    train: Any,
    dev: Any,
    data_args: Any,
    training: Any,
    nebula: NebulaArguments,
    alone: bool,
) -> Any:
    from paddlenlp.data import DataCollatorForSeq2Seq
    from paddlenlp.trl import SFTTrainer
    from paddlenlp.trl.llm_utils import compute_metrics

    fixed = data_args.pad_to_max_length or training.pipeline_parallel_degree > 1 or training.sequence_parallel
    common: dict[str, Any] = {
        "model": model,
        "args": training,
        "tokenizer": tokenizer,
        "eval_dataset": dev,
        "data_collator": DataCollatorForSeq2Seq(
            tokenizer=tokenizer,
            max_length=data_args.max_length if fixed else None,
            padding="max_length" if fixed else True,
            max_label_length=data_args.max_length if fixed else None,
            return_tensors="np",
            return_attention_mask=True,
            pad_to_multiple_of=data_args.pad_to_multiple_of,
        ),
        "compute_metrics": compute_metrics,
        "data_args": data_args,
    }
    return make_trainer(SFTTrainer, nebula, alone, train, **common)
