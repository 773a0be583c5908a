"""Whose parameters are an adapter's: of every kind that PaddleNLP has, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from paddlenlp.peft import LoRAConfig, LoRAModel, PrefixConfig, PrefixModelForCausalLM, ReFTModel, VeRAConfig, VeRAModel
from paddlenlp.peft.prefix import llama_postprocess_past_key_value
from paddlenlp.peft.reft import LoreftIntervention, ReFTConfig
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

from paddlenlp_nebula.adapters.select import adapter_parameters
from paddlenlp_nebula.errors import ConfigurationError

WIDTH, LAYERS = 16, 2
TARGETS = [".*q_proj.*", ".*v_proj.*"]


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def lora() -> Any:
    model = LoRAModel(llama(), LoRAConfig(target_modules=TARGETS, r=2, lora_alpha=4, dtype="float32"))
    model.mark_only_lora_as_trainable()
    return model


def vera() -> Any:
    model = VeRAModel(llama(), VeRAConfig(target_modules=TARGETS, r=2, vera_alpha=4, dtype="float32"))
    model.mark_only_vera_as_trainable()
    return model


def prefix() -> Any:
    config = PrefixConfig(
        num_prefix_tokens=2, num_attention_heads=2, num_hidden_layers=LAYERS, hidden_size=WIDTH, dtype="float32"
    )
    model = PrefixModelForCausalLM(
        model=llama(), prefix_config=config, postprocess_past_key_value=llama_postprocess_past_key_value
    )
    model.mark_only_prefix_as_trainable()
    return model


def reft() -> Any:
    def intervention() -> Any:
        return LoreftIntervention(
            embed_dim=WIDTH,
            low_rank_dimension=2,
            dropout=0.0,
            dtype="float32",
            act_fn="linear",
            device="cpu",
            add_bias=True,
        )

    representations = [
        {"layer": layer, "component": "block_output", "low_rank_dimension": 2, "intervention": intervention()}
        for layer in range(LAYERS)
    ]
    return ReFTModel(ReFTConfig(representations=representations), llama())


KINDS = [(lora, "lora_", 8), (vera, "vera_", 8), (prefix, "prefix_encoder", 1), (reft, "layer.", 6)]


@pytest.mark.parametrize(("build", "word", "count"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_adapter_alone_is_selected(build: Any, word: str, count: int) -> None:
    model = build()
    names = [name for name, _ in adapter_parameters(model)]
    assert len(names) == count
    assert all(word in name for name in names)
    assert not any(parameter.stop_gradient for _, parameter in adapter_parameters(model))


@pytest.mark.parametrize("build", [lora, vera, prefix, reft])
def test_a_base_model_that_is_trained_too_is_refused(build: Any) -> None:
    model = build()
    next(p for name, p in model.model.named_parameters() if "embed_tokens" in name).stop_gradient = False
    with pytest.raises(
        ConfigurationError,
        match=r"needs only the adapter to be trainable, but '.*embed_tokens.*' is too: call model\.\w+\(\)",
    ):
        adapter_parameters(model)
