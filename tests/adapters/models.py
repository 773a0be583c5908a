"""Small models with adapters of paddlenlp.peft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.peft.lora.lora_layers import LoRAConv2D


class Classifier(paddle.nn.Layer):  # type: ignore[misc]
    """Two layers, 6 -> 5 -> 3, and a head, with the config that paddlenlp.peft asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tensor_parallel_degree=-1, to_dict=dict)
        self.first = paddle.nn.Linear(6, 5)
        self.second = paddle.nn.Linear(5, 3)
        self.head = paddle.nn.Linear(3, 2)

    def forward(self, inputs: Any) -> Any:
        return self.head(self.second(paddle.nn.functional.relu(self.first(inputs))))


def lora(rank: int = 2, seed: int = 0, **options: Any) -> Any:
    """A LoRA model with adapters in both layers and a trainable head."""
    paddle.seed(seed)
    config = {"target_modules": ["first", "second"], "trainable_modules": ["head.*"], "lora_alpha": 8, **options}
    return LoRAModel(Classifier(), LoRAConfig(r=rank, **config))


def with_convolution() -> Any:
    model = lora()
    model.model.convolution = LoRAConv2D(2, 3, 3, r=2)
    return model
