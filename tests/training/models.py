"""Tiny models and deterministic samples for the training tests."""

from __future__ import annotations

import tempfile
import zlib

import numpy as np
import paddle
from paddle import nn
from paddlenlp.peft import (
    LoKrConfig,
    LoKrModel,
    LoRAConfig,
    LoRAModel,
    PrefixConfig,
    PrefixModelForCausalLM,
    VeRAConfig,
    VeRAModel,
)
from paddlenlp.peft.prefix import llama_postprocess_past_key_value
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["build", "samples"]

_VOCABULARY, _LENGTH, _WIDTH = 64, 8, 16


class Mlp(nn.Layer):
    """Two layers, a classifier of vectors.

    Args:
        tied: the output layer is the transposed input layer, one parameter under two names.
        unused: a parameter without a gradient is there as well.
        frozen: the first layer does not learn.
        dropout: the hidden layer is dropped out, from Paddle's random state.
        norm: the hidden layer is batch-normalised.
        half: parameters are kept in bfloat16.
    """

    def __init__(
        self,
        tied: bool = False,
        unused: bool = False,
        frozen: bool = False,
        dropout: bool = False,
        norm: bool = False,
        half: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, 32)
        self.second = nn.Linear(32, _WIDTH)
        if tied:
            self.alias = self.first.weight
            self.second.bias.stop_gradient = False
        if unused:
            self.unused = nn.Linear(4, 4)
        if frozen:
            for parameter in self.first.parameters():
                parameter.stop_gradient = True
        self._tied = tied
        if half:
            self.to(dtype="bfloat16")
        self.norm = nn.BatchNorm1D(32) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.3 if dropout else 0.0)

    def forward(self, x, labels=None):
        hidden = self.dropout(nn.functional.tanh(self.norm(_linear(x, self.first))))
        logits = hidden @ self.alias.T if self._tied else _linear(hidden, self.second)
        return nn.functional.cross_entropy(logits, labels), logits


def _linear(x, layer: nn.Linear):
    """In float32 whatever the parameters are: Paddle has no bfloat16 product on every CPU."""
    return nn.functional.linear(x, layer.weight.astype(x.dtype), layer.bias.astype(x.dtype))


def _llama(**overrides) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        seq_length=_LENGTH,
        use_flash_attention=False,
        **overrides,
    )
    return LlamaForCausalLM(config)


_TARGETS = [".*q_proj.*", ".*v_proj.*"]


def build(name: str):
    """A model by name; everything random comes from Paddle's present seed."""
    if name.startswith("mlp"):
        return Mlp(**dict.fromkeys(name.split("-")[1:], True))
    if name == "llama":
        return _llama()
    if name == "llama-tied":
        return _llama(tie_word_embeddings=True)
    if name == "llama-recompute":
        return _llama(use_recompute=True)
    if name in ("lora", "lora-wide"):
        rank = 4 if name == "lora" else 8
        model = LoRAModel(_llama(), LoRAConfig(target_modules=_TARGETS, r=rank, lora_alpha=8, dtype="float32"))
        model.mark_only_lora_as_trainable()
        return model
    if name.startswith("vera"):
        model = VeRAModel(_llama(), VeRAConfig(target_modules=_TARGETS, r=4, vera_alpha=8, dtype="float32"))
        model.mark_only_vera_as_trainable(notfreezeB=name == "vera-free")
        return model
    if name == "lokr":
        base = _llama()
        with tempfile.TemporaryDirectory() as folder:  # LoKrModel wants to read the base model's config from a folder
            base.config.save_pretrained(folder)
            config = LoKrConfig(
                base_model_name_or_path=folder, target_modules=_TARGETS, lokr_dim=4, lokr_alpha=8, dtype="float32"
            )
            model = LoKrModel(base, config)
        model.mark_only_lokr_as_trainable()
        return model
    if name == "prefix":
        config = PrefixConfig(
            num_prefix_tokens=2,
            num_attention_heads=4,
            num_hidden_layers=2,
            hidden_size=32,
            prefix_projection=False,
            dtype="float32",
        )
        model = PrefixModelForCausalLM(
            model=_llama(), prefix_config=config, postprocess_past_key_value=llama_postprocess_past_key_value
        )
        model.mark_only_prefix_as_trainable()
        return model
    raise ValueError(f"no model {name!r}")


def samples(kind: str, owner: str, start: int, stop: int, length: int | None = None) -> list[dict[str, np.ndarray]]:
    """Samples start..stop of an owner's endless sequence, the same in every process; ``length`` in tokens."""
    found = []
    for number in range(start, stop):
        random = np.random.RandomState(zlib.crc32(f"{owner} {number}".encode()))
        if kind == "vectors":
            x = random.randn(_WIDTH).astype("float32")
            found.append({"x": x, "labels": np.int64(np.argmax(x))})
        else:
            ids = random.randint(1, _VOCABULARY, length or _LENGTH).astype("int64")
            found.append({"input_ids": ids, "labels": ids})
    return found


paddle.set_device("cpu")
