"""A model as a chain of blocks, each a run of consecutive layers: what teacher and student are cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import paddle
from paddle import nn

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Block", "Parts", "cut", "parts_of"]


def _no_bias(mask: Tensor, dtype: Any) -> Tensor | None:
    return None


def _alone(layer: nn.Layer, hidden: Tensor, bias: Tensor | None) -> Tensor:
    return layer(hidden)


@dataclass(frozen=True)
class Parts:
    """What a model is made of, and how its layers are called.

    Attributes:
        embed: token ids, int64, shape (samples, length), to hidden states, shape (samples, length, width).
        layers: hidden states to hidden states, one after another.
        width: of the hidden states.
        finish: after the last layer (a final norm), or None.
        bias: from the mask, bool, shape (samples, length), and a dtype to what every layer gets beside the hidden
            states; made once for each block and batch.
        call: calls one layer with hidden states and that bias.
    """

    embed: nn.Layer
    layers: Sequence[nn.Layer]
    width: int
    finish: nn.Layer | None = None
    bias: Callable[[Tensor, Any], Tensor | None] = _no_bias
    call: Callable[[nn.Layer, Tensor, Tensor | None], Tensor] = _alone


def parts_of(model: Any) -> Parts:
    """The parts of one of PaddleNLP's encoders built as BertModel is, or decoders as LlamaModel; a head is left out.

    An encoder's token types are all 0, and its pooler is left out, too.

    Raises:
        NebulaError: the model is of neither form.
    """
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if hasattr(base, "embeddings") and hasattr(getattr(base, "encoder", None), "layers"):
        encoder = base.encoder
        return Parts(
            base.embeddings, list(encoder.layers), base.config.hidden_size, encoder.norm, _encoder_bias, _encoder_call
        )
    if hasattr(base, "embed_tokens") and hasattr(base, "_prepare_decoder_attention_mask"):

        def causal(mask: Tensor, dtype: Any) -> Tensor:
            return base._prepare_decoder_attention_mask(mask, tuple(mask.shape), 0, dtype)

        return Parts(base.embed_tokens, list(base.layers), base.config.hidden_size, base.norm, causal, _decoder_call)
    raise NebulaError(
        f"a model to cut must have embeddings and encoder.layers, as BERT has, or embed_tokens and layers, as Llama has, "
        f"got {type(model).__name__}: describe it by Parts yourself"
    )


def _encoder_bias(mask: Tensor, dtype: Any) -> Tensor:
    """Shape (samples, 1, 1, length): 0 or -1e4, as `paddlenlp.transformers.BertModel` makes it."""
    return (1.0 - mask.unsqueeze([1, 2]).astype(dtype)) * -1e4


def _encoder_call(layer: nn.Layer, hidden: Tensor, bias: Tensor | None) -> Tensor:
    return layer(hidden, src_mask=bias)


def _decoder_call(layer: nn.Layer, hidden: Tensor, bias: Tensor | None) -> Tensor:
    samples, length, _ = hidden.shape
    positions = paddle.arange(length, dtype="int64").expand([samples, length])
    return layer(hidden, position_ids=positions, attention_mask=bias)


class Block(nn.Layer):
    """Some consecutive layers of a model; the first block begins with the embeddings, the last ends with ``finish``.

    The layers are the model's own, not copies: what a block learns the model has.

    Args:
        parts: of the model.
        start, stop: of its layers.

    Attributes:
        width: of the hidden states.
        first: whether it takes token ids rather than hidden states.
    """

    def __init__(self, parts: Parts, start: int, stop: int) -> None:
        super().__init__()
        self.width, self.first = parts.width, start == 0
        self.embed = parts.embed if self.first else None
        self.layers = nn.LayerList(list(parts.layers[start:stop]))
        self.finish = parts.finish if stop == len(parts.layers) else None
        self._bias, self._call = parts.bias, parts.call

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        """One pass.

        Args:
            state: hidden states, any floating dtype, shape (samples, length, width); for the first block token ids,
                int64, shape (samples, length).
            mask: positions that count, bool, shape (samples, length).

        Returns:
            Hidden states of the layers' own dtype, shape (samples, length, width).
        """
        dtype = next(iter(self.layers.parameters())).dtype
        hidden = self.embed(state) if self.embed is not None else state.astype(dtype)
        bias = self._bias(mask, dtype)
        for layer in self.layers:
            hidden = self._call(layer, hidden, bias)
        return hidden if self.finish is None else self.finish(hidden)


def cut(parts: Parts, number: int) -> list[Block]:
    """As many blocks, of as equal length as can be, longer ones first.

    Raises:
        NebulaError: the model has fewer layers than that.
    """
    count = len(parts.layers)
    if not 1 <= number <= count:
        raise NebulaError(f"a model of {count} layers must be cut into 1 to {count} blocks, got {number}")
    ends = [-(-count * index // number) for index in range(number + 1)]
    return [Block(parts, start, stop) for start, stop in pairwise(ends)]
