"""Finding a model's pairs, and freezing half of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddlenlp.peft import VeRAConfig, VeRAModel

from paddlenlp_nebula.adapters.lora import freeze_a, lora_pairs
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.selection import select

from .models import Classifier, lora, with_convolution


@pytest.mark.parametrize(("options", "scaling"), [({}, 2.0), ({"rslora": True}, 4.0), ({"use_quick_lora": True}, 2.0)])
def test_the_pairs_are_what_the_layers_add(options: dict[str, Any], scaling: float) -> None:
    model = lora(4, **options)
    pairs = lora_pairs(model)
    assert [(pair.name, pair.a.shape, pair.b.shape, pair.scaling) for pair in pairs] == [
        ("model.first", [6, 4], [4, 5], scaling),
        ("model.second", [5, 4], [4, 3], scaling),
    ]
    inputs = paddle.randn([7, 6])
    before = model.model.first(inputs)
    pairs[0].b.set_value(paddle.randn([4, 5]))
    added = inputs @ pairs[0].a @ pairs[0].b * pairs[0].scaling
    np.testing.assert_allclose(model.model.first(inputs).numpy(), (before + added).numpy(), rtol=1e-4, atol=1e-5)
    names = dict(model.named_parameters())
    assert all(names[f"{p.name}.lora_A"] is p.a and names[f"{p.name}.lora_B"] is p.b for p in pairs)


def test_freezing_a_takes_it_out_of_the_selection() -> None:
    model = lora()
    names = freeze_a(model)
    assert names == ["model.first.lora_A", "model.second.lora_A"]
    assert freeze_a(model) == names
    assert select(model, "adapters").names == [
        "model.first.lora_B",
        "model.second.lora_B",
        "model.head.weight",
        "model.head.bias",
    ]
    before = [model.model.first.lora_A.numpy(), model.model.first.lora_B.numpy()]
    optimizer = paddle.optimizer.AdamW(parameters=[p for p in model.parameters() if not p.stop_gradient])
    model(paddle.randn([4, 6])).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(model.model.first.lora_A.numpy(), before[0])
    assert (model.model.first.lora_B.numpy() != before[1]).any()


def test_frozen_factors_are_refused() -> None:
    model = lora()
    freeze_a(model)
    with pytest.raises(
        ConfigurationError,
        match=r"'product' changes every lora_A and lora_B, but 'model.first.lora_A' is frozen and 1 more are: call "
        r"model.mark_only_lora_as_trainable\(\), or use the rule 'freeze_a'",
    ):
        lora_pairs(model)


def vera() -> Any:
    return VeRAModel(Classifier(), VeRAConfig(r=2, target_modules=["first"], vera_alpha=2))


def without_layers() -> Any:
    model = lora()
    model.model = paddle.nn.Linear(2, 2)
    return model


def inactive(method: str) -> Callable[[], Any]:
    def build() -> Any:
        model = lora()
        getattr(model, method)()
        return model

    return build


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (Classifier, "needs a LoRAModel, since it looks at the two factors of each layer, got Classifier: use .* 'mean'"),
    (vera, "got VeRAModel"),
    (lambda: lora(use_mora=True), "cannot act with use_mora, which has one square matrix"),
    (lambda: lora(lora_use_mixer=True), "cannot act with lora_use_mixer, which has a third factor"),
    (lambda: lora(pissa=True), "cannot act with pissa, which takes A and B out of the frozen weights"),
    (with_convolution, "knows the layers LoRALinear and QuantizationLoRALinear, got LoRAConv2D at 'model.convolution'"),
    (inactive("disable_lora"), r"got disable_lora=True at 'model.first': call model.enable_lora\(\)"),
    (inactive("merge"), r"got merged=True at 'model.first': call model.unmerge\(\)"),
    (without_layers, "needs a LoRA layer, got a LoRAModel without any: check target_modules"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
@pytest.mark.parametrize(("rule", "name"), [(lora_pairs, "product"), (freeze_a, "freeze_a")])
def test_what_the_rules_cannot_act_on_is_refused(
    build: Callable[[], Any], message: str, rule: Callable[[Any], Any], name: str
) -> None:
    model = build()
    frozen = [p.stop_gradient for p in model.parameters()]
    with pytest.raises(ConfigurationError, match=f"the merge rule '{name}' .*{message}"):
        rule(model)
    assert frozen == [p.stop_gradient for p in model.parameters()]
