"""The arguments of the recipe ``sft``: those of PaddleNLP's own fine-tuning script, less what is not honoured here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp.trl import DataConfig, ModelConfig, SFTConfig

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["SftDataConfig", "SftModelConfig", "SftTrainingArguments"]

_ADAPTERS = ("lora", "prefix_tuning", "vera", "lokr")

# What a user's file may hold and this recipe cannot do. A key of the file that is at its default changes nothing.
_NOT_HONOURED_MODEL = {
    "use_fast_layer_norm",
    "weight_quantize_algo",
    "reft",
    "lokr_path",
    "prefix_path",
    "from_aistudio",
    "save_to_aistudio",
    "neftune",
    "flash_mask",
    "use_long_sequence_strategies",
}
_NOT_HONOURED_DATA = {
    "task_name",
    "zero_padding",
    "greedy_zero_padding",
    "eval_with_do_generation",
    "save_generation_output",
    "lazy",
    "autoregressive",
    "use_pose_convert",
}
_NOT_HONOURED_TRAINING = {
    "do_predict",
    "do_export",
    "benchmark",
    "autotuner_benchmark",
    "use_ssa",
    "dataset_text_field",
    "max_seq_length",
    "model_init_kwargs",
    "dataset_kwargs",
    "eval_packing",
}


def _refused(instance: Any, names: set[str]) -> list[str]:
    """One sentence for each field among ``names`` that is not at its default."""
    return [
        f"{field.name} must stay {field.default!r}, got {getattr(instance, field.name)!r}: "
        "the recipe sft does not do this; remove the key"
        for field in dataclasses.fields(instance)
        if field.name in names and getattr(instance, field.name) != field.default
    ]


@dataclass
class SftModelConfig(ModelConfig):
    """``paddlenlp.trl.ModelConfig``, checked.

    Raises:
        ConfigurationError: with every problem at once.
    """

    def __post_init__(self) -> None:
        problems = _refused(self, _NOT_HONOURED_MODEL)
        if not self.model_name_or_path:
            problems.append("model_name_or_path must be a model's folder or name, got nothing")
        chosen = [name for name in _ADAPTERS if getattr(self, name)]
        if len(chosen) > 1:
            problems.append(f"at most one of {', '.join(_ADAPTERS)} can be true, got {' and '.join(chosen)}")
        if self.lora_path and not self.lora:
            problems.append(f"lora_path needs lora: true, got lora_path: {self.lora_path!r} without it")
        for name in ("lora_rank", "vera_rank", "lokr_dim", "num_prefix_tokens"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if problems:
            raise ConfigurationError(problems)


@dataclass
class SftDataConfig(DataConfig):
    """``paddlenlp.trl.DataConfig``, checked.

    Raises:
        ConfigurationError: with every problem at once.
    """

    def __post_init__(self) -> None:
        problems = _refused(self, _NOT_HONOURED_DATA)
        if not self.dataset_name_or_path or not (Path(self.dataset_name_or_path) / "train.json").is_file():
            problems.append(
                "dataset_name_or_path must be a folder with train.json (and dev.json), one "
                f'{{"src": ..., "tgt": ...}} a line, got {self.dataset_name_or_path!r}'
            )
        if self.chat_template is not None and self.chat_template.lower() != "none":
            problems.append(
                f"chat_template must be 'none' or not set, got {self.chat_template!r}: the recipe sft trains on plain "
                "src and tgt"
            )
        if not 1 <= self.src_length < self.max_length:
            problems.append(
                f"src_length must be at least 1 and less than max_length ({self.max_length}), got {self.src_length}"
            )
        if problems:
            raise ConfigurationError(problems)


@dataclass
class SftTrainingArguments(SFTConfig):
    """``paddlenlp.trl.SFTConfig``, checked.

    Raises:
        ConfigurationError: with every problem at once.
    """

    def __post_init__(self) -> None:
        if problems := _refused(self, _NOT_HONOURED_TRAINING):
            raise ConfigurationError(problems)
        super().__post_init__()
