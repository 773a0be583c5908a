"""Which parameters of a model are its adapter's."""

from __future__ import annotations

import re

from paddlenlp.peft import LoKrModel, LoRAModel, PrefixModelForCausalLM, ReFTModel, VeRAModel

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["adapter_parameters"]

# class -> (name of its config attribute, how its adapter's parameters are named, how to freeze the rest)
_ADAPTERS = {
    LoRAModel: ("lora_config", r"lora_", "mark_only_lora_as_trainable"),
    VeRAModel: ("vera_config", r"vera_", "mark_only_vera_as_trainable"),
    LoKrModel: ("lokr_config", r"lokr_", "mark_only_lokr_as_trainable"),
    PrefixModelForCausalLM: ("prefix_config", r"prefix_encoder", "mark_only_prefix_as_trainable"),
    ReFTModel: ("config", r"^layer\.\d+\.", "disable_model_gradients"),
}


def adapter_parameters(model: Tensor) -> list[tuple[str, Tensor]]:
    """The trainable parameters of an adapter model: the adapter and its ``trainable_modules`` (a head, say).

    Args:
        model: the model as the Trainer holds it, unwrapped.

    Raises:
        ConfigurationError: the model has no adapter, or more than the adapter is trainable.
    """
    for kind, (config_name, pattern, freeze) in _ADAPTERS.items():
        if not isinstance(model, kind):
            continue
        config = getattr(model, config_name, None)
        modules = tuple(getattr(config, "trainable_modules", None) or ())
        bias = getattr(config, "trainable_bias", None)
        trainable = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
        for name, _ in trainable:
            # trainable_modules are matched against the inner model's names
            inner = name.removeprefix("model.")
            declared = re.search(pattern, name) or any(re.fullmatch(module, inner) for module in modules)
            if not (declared or (bias and "bias" in name)):
                raise ConfigurationError(
                    [
                        f"sync_parameters='adapters' needs only the adapter to be trainable, but {name!r} is too: call "
                        f"model.{freeze}(), name it in trainable_modules, or use sync_parameters='trainable'"
                    ]
                )
        return trainable
    raise ConfigurationError(
        [
            "sync_parameters='adapters' needs a model with an adapter (LoRAModel, VeRAModel, LoKrModel, "
            f"PrefixModelForCausalLM or ReFTModel), got {type(model).__name__}: use sync_parameters='trainable'"
        ]
    )
