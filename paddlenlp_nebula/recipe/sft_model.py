"""The causal language model of the recipe ``sft`` and its adapters, made as PaddleNLP's fine-tuning script makes them."""

from __future__ import annotations

from typing import Any

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["add_adapters", "load_model", "load_tokenizer"]


def load_model(model_args: Any, data_args: Any, training: Any) -> Any:
    """The model named by ``model_name_or_path``, or its shape with new weights if not ``continue_training``."""
    from paddlenlp.transformers import AutoConfig, AutoModelForCausalLM
    from paddlenlp.transformers.configuration_utils import LlmMetaConfig

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, dtype=dtype_of(training))
    LlmMetaConfig.set_llm_config(config, training)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, getattr(model_args, name))
    for name in ("fuse_attention_qkv", "fuse_attention_ffn"):
        if getattr(model_args, name) is not None:
            setattr(config, name, getattr(model_args, name))
    if hasattr(config, "ignore_index"):
        config.ignore_index = -100
    config.seq_length = data_args.max_length
    if model_args.continue_training:
        return AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    return AutoModelForCausalLM.from_config(config, dtype=dtype_of(training))


def load_tokenizer(model_args: Any, data_args: Any) -> Any:
    """The model's tokenizer, with something to pad with.

    Raises:
        ConfigurationError: if it brings a chat template, which this recipe does not apply.
    """
    from paddlenlp.transformers import AutoTokenizer, Llama3Tokenizer, LlamaTokenizer

    name = model_args.tokenizer_name_or_path or model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)
    if data_args.chat_template is not None:  # "none", see SftDataConfig
        tokenizer.chat_template = None
    if tokenizer.chat_template is not None:
        raise ConfigurationError(
            [
                f"chat_template must be 'none' for {name!r}, whose tokenizer brings one, got nothing: the recipe sft "
                "trains on plain src and tgt; if you need the template, start your own script with `nebula launch`"
            ]
        )
    if isinstance(tokenizer, (LlamaTokenizer, Llama3Tokenizer)) or tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def add_adapters(model: Any, model_args: Any, training: Any) -> Any:
    """Wrap the model in the adapter that the flags ask for; without a flag the whole model is trained."""
    from paddlenlp import peft
    from paddlenlp.trl.llm_utils import get_lora_target_modules, get_prefix_tuning_params

    common = {"dtype": dtype_of(training)}
    if model_args.prefix_tuning:
        shape = get_prefix_tuning_params(model)
        postprocess = shape.pop("postprocess_past_key_value")
        prefix = peft.PrefixConfig(num_prefix_tokens=model_args.num_prefix_tokens, **shape, **common)
        adapted = peft.PrefixModelForCausalLM(model=model, prefix_config=prefix, postprocess_past_key_value=postprocess)
        adapted.mark_only_prefix_as_trainable()
        return adapted
    common |= {"base_model_name_or_path": model_args.model_name_or_path}
    if model_args.lora and model_args.lora_path:
        return peft.LoRAModel.from_pretrained(model, model_args.lora_path)
    if model_args.lora:
        lora = peft.LoRAConfig(
            target_modules=get_lora_target_modules(model),
            r=model_args.lora_rank,
            # The script's own rule.
            lora_alpha=4 if model_args.rslora else 2 * model_args.lora_rank,
            rslora=model_args.rslora,
            lora_plus_scale=model_args.lora_plus_scale,
            pissa=model_args.pissa,
            use_quick_lora=model_args.use_quick_lora,
            lora_use_mixer=model_args.lora_use_mixer,
            use_mora=model_args.use_mora,
            tensor_parallel_degree=training.tensor_parallel_degree,
            **common,
        )
        return peft.LoRAModel(model, lora)
    if model_args.vera:
        vera = peft.VeRAConfig(
            target_modules=get_lora_target_modules(model),
            r=model_args.vera_rank,
            vera_alpha=model_args.vera_rank,
            pissa_init=True,
            **common,
        )
        adapted = peft.VeRAModel(model, vera)
        adapted.mark_only_vera_as_trainable(notfreezeB=True)
        return adapted
    if model_args.lokr:
        lokr = peft.LoKrConfig(target_modules=get_lora_target_modules(model), lokr_dim=model_args.lokr_dim, **common)
        return peft.LoKrModel(model, lokr)
    return model


def dtype_of(training: Any) -> str:
    """What the weights are stored in: 16 bits under the O2 level of mixed precision.

    Raises:
        ConfigurationError: if O2 is asked for without saying which 16 bits.
    """
    if training.fp16_opt_level != "O2":
        return "float32"
    if training.fp16 == training.bf16:
        raise ConfigurationError(
            [f"fp16_opt_level: O2 needs either fp16 or bf16, got fp16: {training.fp16}, bf16: {training.bf16}"]
        )
    return "float16" if training.fp16 else "bfloat16"
