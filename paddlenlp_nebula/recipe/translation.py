"""What the recipes that translate have in common: a small T5, its loss, greedy translations and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_nebula.distill.losses.divergence import cross_entropy, mean
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.recipe.translation_data import encode, pad
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Sizes", "TokenLoss", "load_metrics", "make_model", "score", "translate"]


@dataclass(frozen=True)
class Sizes:
    """Of a T5.

    Attributes:
        width: of the hidden states, a multiple of ``heads``.
        feed_forward: inner width of the feed-forward blocks.
        heads: of each attention.
        encoder_layers, decoder_layers: numbers of blocks.
        dropout: share of activations dropped in training.
    """

    width: int
    feed_forward: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    dropout: float


def make_model(sizes: Sizes, tokenizer: Any) -> Any:
    """A T5 with fresh parameters from Paddle's random state, its input and output embeddings tied.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020),
    section 2.1.
    """
    from paddlenlp.transformers import T5Config, T5ForConditionalGeneration

    start = tokenizer.pad_token_id  # what T5's targets start with
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=sizes.width,
        d_kv=sizes.width // sizes.heads,
        d_ff=sizes.feed_forward,
        num_heads=sizes.heads,
        num_layers=sizes.encoder_layers,
        num_decoder_layers=sizes.decoder_layers,
        dropout_rate=sizes.dropout,
        tie_word_embeddings=True,
        pad_token_id=start,
        bos_token_id=start,
        decoder_start_token_id=start,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5ForConditionalGeneration(config)


class TokenLoss(paddle.nn.Layer):
    """Cross-entropy per token, as the Trainer's ``criterion``.

    T5's own loss, with labels of -100, divides by the padding's tokens, too.
    """

    def forward(self, outputs: Any, labels: Tensor) -> Tensor:
        """The mean over the tokens that have a label, a scalar.

        Args:
            outputs: of the model: its logits, shape (rows, length, tokens of the vocabulary), or a tuple that starts with
                them.
            labels: int64, shape (rows, length).
        """
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return mean(cross_entropy(logits.reshape([-1, logits.shape[-1]]), labels.flatten()))


def translate(
    model: Any, tokenizer: Any, sentences: Sequence[str], *, max_length: int, batch_size: int = 32
) -> list[str]:
    """Greedy translations, in the order of the sentences.

    Args:
        model: a T5ForConditionalGeneration; it is left in evaluation mode.
        tokenizer: the model's.
        sentences: what is beyond ``max_length`` tokens of one is not read.
        max_length: tokens of a translation at most, too.
        batch_size: sentences at once, which are of similar lengths.
    """
    model.eval()
    encoded = [encode(tokenizer, sentence)[:max_length] for sentence in sentences]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    translations = [""] * len(encoded)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        ids, mask = pad([encoded[index] for index in batch], tokenizer.pad_token_id)
        with paddle.no_grad():
            generated, _ = model.generate(
                paddle.to_tensor(ids),
                attention_mask=paddle.to_tensor(mask),
                max_new_tokens=max_length,
                decode_strategy="greedy_search",
            )
        for index, tokens in zip(batch, generated.tolist(), strict=True):
            # The tokenizer's "clean-up" is for English: it would take blanks that belong there.
            translations[index] = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return translations


def score(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """How near translations are to one reference each, over the corpus, by the package sacrebleu's defaults.

    Source: M. Post, "A Call for Clarity in Reporting BLEU Scores" (2018); M. Popovic, "chrF: character n-gram F-score for
    automatic MT evaluation" (2015).

    Returns:
        ``bleu`` and ``chrf``, both from 0 to 100, and ``bleu_signature`` and ``chrf_signature``: how they were made.

    Raises:
        NebulaError: there are not as many translations as references.
    """
    if len(translations) != len(references) or not references:
        raise NebulaError(
            f"expected as many translations as references, and some, got {len(translations)} and {len(references)}"
        )
    scores: dict[str, Any] = {}
    for name, metric in load_metrics().items():
        scores[name] = float(metric.corpus_score(list(translations), [list(references)]).score)
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def load_metrics() -> dict[str, Any]:
    """The metrics of `score`, by name.

    Raises:
        NebulaError: the package is missing.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise NebulaError(
            "expected the package sacrebleu, which scores translations, found none: "
            "`pip install 'paddlenlp-nebula[translation]'`"
        ) from None
    return {"bleu": BLEU(), "chrf": CHRF()}
