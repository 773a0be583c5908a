"""The pairs of LoRA factors in a model of ``paddlenlp.peft``, for the rules that look at A and B together."""

from __future__ import annotations

from typing import NamedTuple

from paddlenlp.peft import LoRAModel

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["LoraPair", "freeze_a", "lora_pairs"]

_LAYERS = ("LoRALinear", "QuantizationLoRALinear")  # by name: the second is importable only where paddleslim is


class LoraPair(NamedTuple):
    """One layer's LoRA; the layer's weight is, in effect, larger by ``a @ b * scaling``.

    Attributes:
        name: the layer's, as ``model.named_sublayers()`` gives it; its parameters are NAME.lora_A and NAME.lora_B.
        a, b: the parameters, shapes (in, rank) and (rank, out).
        scaling: alpha / rank, or alpha / sqrt(rank) with rslora.
    """

    name: str
    a: Tensor
    b: Tensor
    scaling: float


def lora_pairs(model: Tensor) -> list[LoraPair]:
    """The factors of every LoRA layer, in the model's order.

    Args:
        model: the model as the Trainer holds it, unwrapped.

    Raises:
        ConfigurationError: the adapter is no LoRA, a variant in which A @ B is not what a layer adds, or not all of
            its factors are trained.
    """
    pairs = _pairs(model, "product")
    factors = [(f"{p.name}.{kind}", factor) for p in pairs for kind, factor in (("lora_A", p.a), ("lora_B", p.b))]
    if frozen := [name for name, factor in factors if factor.stop_gradient]:
        raise ConfigurationError(
            [
                f"the merge rule 'product' changes every lora_A and lora_B, but {frozen[0]!r} is frozen"
                f"{f' and {len(frozen) - 1} more are' if len(frozen) > 1 else ''}: call "
                "model.mark_only_lora_as_trainable(), or use the rule 'freeze_a'"
            ]
        )
    return pairs


def freeze_a(model: Tensor) -> list[str]:
    """Stop training every lora_A, so that averaging lora_B averages the products exactly (FFA-LoRA, arXiv 2403.12313).

    All clusters need the same A, and so the same rank: the handshake compares what does not travel.

    Args:
        model: the model as the Trainer holds it, unwrapped; before the optimizer is made.

    Returns:
        The names of the frozen parameters, as ``model.named_parameters()`` gives them.

    Raises:
        ConfigurationError: the adapter is no LoRA, or a variant in which A @ B is not what a layer adds.
    """
    names = []
    for pair in _pairs(model, "freeze_a"):
        pair.a.stop_gradient = True
        names.append(f"{pair.name}.lora_A")
    return names


def _pairs(model: Tensor, rule: str) -> list[LoraPair]:
    if not isinstance(model, LoRAModel):
        raise ConfigurationError(
            [
                f"the merge rule {rule!r} needs a LoRAModel, since it looks at the two factors of each layer, got "
                f"{type(model).__name__}: use the rule 'mean'"
            ]
        )
    config = model.lora_config
    for field, reason in (
        ("use_mora", "has one square matrix in place of A and B"),
        ("lora_use_mixer", "has a third factor between A and B"),
        ("pissa", "takes A and B out of the frozen weights at the first step, on each cluster anew"),
    ):
        if getattr(config, field, False):
            raise ConfigurationError([f"the merge rule {rule!r} cannot act with {field}, which {reason}: use 'mean'"])
    pairs = []
    for name, layer in model.named_sublayers():
        if getattr(layer, "lora_A", None) is None:
            continue
        kind = type(layer).__name__
        if kind not in _LAYERS:
            raise ConfigurationError(
                [
                    f"the merge rule {rule!r} knows the layers {' and '.join(_LAYERS)}, got {kind} at {name!r}: leave it "
                    "out of target_modules, train without tensor parallelism, or use the rule 'mean'"
                ]
            )
        for state, remedy in (("disable_lora", "enable_lora"), ("merged", "unmerge")):
            if getattr(layer, state, False):
                raise ConfigurationError(
                    [
                        f"the merge rule {rule!r} needs an active LoRA in every layer, got {state}=True at {name!r}: call "
                        f"model.{remedy}() before training"
                    ]
                )
        pairs.append(LoraPair(name, layer.lora_A, layer.lora_B, float(layer.scaling)))
    if not pairs:
        raise ConfigurationError(
            [f"the merge rule {rule!r} needs a LoRA layer, got a LoRAModel without any: check target_modules"]
        )
    return pairs
