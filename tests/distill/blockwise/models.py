"""Small teachers, students and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_nebula.distill.blockwise.blocks import Block, Parts, parts_of
from paddlenlp_nebula.distill.blockwise.pair import Average, Pair, pairs_of
from paddlenlp_nebula.distill.blockwise.stage import Activation

VOCABULARY = 40


def bert(layers: int, width: int) -> Any:
    from paddlenlp.transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def llama(layers: int, width: int) -> Any:
    from paddlenlp.transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=16,
            use_flash_attention=False,
        )
    )


def perceptron(layers: int, width: int) -> Parts:
    """Any list of layers."""
    made = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return Parts(nn.Embedding(VOCABULARY, width), made, width)


def linear(width: int) -> Block:
    """The second block of two that are a linear map each."""
    layers = [nn.Linear(width, width, bias_attr=False) for _ in range(2)]
    return Block(Parts(nn.Embedding(VOCABULARY, width), layers, width), 1, 2)


def parts(family: str, layers: int, width: int) -> Parts:
    makers: dict[str, Callable[[int, int], Any]] = {"bert": bert, "llama": llama}
    return perceptron(layers, width) if family == "perceptron" else parts_of(makers[family](layers, width))


def adam(parameters: list[Any]) -> Any:
    return paddle.optimizer.AdamW(learning_rate=1e-2, parameters=parameters)


def pairs(
    family: str,
    blocks: int = 3,
    teacher: tuple[int, int] = (4, 16),
    student: tuple[int, int] = (3, 8),
    average: Average | None = None,
) -> list[Pair]:
    """The same ones at every call."""
    paddle.seed(7)
    return pairs_of(parts(family, *teacher), parts(family, *student), blocks, adam, average)


def batches(count: int = 4, samples: int = 4, length: int = 6) -> Iterator[Activation]:
    """Token ids; the first batch has no padding, later ones do."""
    draw = np.random.default_rng(3)
    for number in range(count):
        lengths = np.full(samples, length) if number == 0 else draw.integers(1, length + 1, samples)
        yield Activation(number, np.arange(length) < lengths[:, None], draw.integers(1, VOCABULARY, (samples, length)))
