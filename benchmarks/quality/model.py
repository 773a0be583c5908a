"""A decoder for bytes, as plain as it can be: it is trained hundreds of times on one CPU core."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

__all__ = ["VOCABULARY", "Decoder"]

VOCABULARY = 256


class _Block(nn.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias_attr=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias_attr=False)
        self.down = nn.Linear(4 * width, width, bias_attr=False)

    def forward(self, x: Any, mask: Any, shape: tuple[int, int]) -> Any:
        # Activations stay flat, (batch * length, width): Paddle's gradient of a 3-D matmul is slower.
        y = self.attention_norm(x)
        query, key, value = (
            layer(y).reshape([*shape, self._heads, -1]).transpose([0, 2, 1, 3])
            for layer in (self.query, self.key, self.value)
        )
        scores = paddle.matmul(query, key, transpose_y=True) * (query.shape[-1] ** -0.5)
        mixed = paddle.matmul(F.softmax(scores + mask), value).transpose([0, 2, 1, 3])
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(F.relu(self.up(self.feed_norm(x))))


class Decoder(nn.Layer):
    """A pre-norm Transformer decoder over bytes, without biases in its projections and without dropout.

    Args:
        width: of the residual stream, a multiple of ``heads``.
        depth: number of blocks.
        heads: of attention.
        context: length of the sequences.
    """

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        normal = paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, 0.02))
        self.bytes = nn.Embedding(VOCABULARY, width, weight_attr=normal)
        self.positions = nn.Embedding(context, width, weight_attr=normal)
        self.blocks = nn.LayerList([_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias_attr=False)
        self._mask = paddle.triu(paddle.full([context, context], -1e9), 1)

    def forward(self, windows: Any) -> Any:
        """Mean cross-entropy in nats per byte of predicting all but the first; int64, shape (batch, context + 1)."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        shape = tuple(inputs.shape)
        x = (self.bytes(inputs) + self.positions.weight).flatten(0, 1)
        for block in self.blocks:
            x = block(x, self._mask, shape)
        return F.cross_entropy(self.head(self.norm(x)), targets.flatten())
