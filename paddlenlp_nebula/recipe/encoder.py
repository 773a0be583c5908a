"""The encoder of the classification recipe: MiniLM-L6, or a small BERT from scratch where it cannot be had."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.minilm import build_minilm

__all__ = ["Encoder", "load_encoder", "make_vocabulary", "small_bert"]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SCRATCH_VOCABULARY = 4_000
_SCRATCH_SHAPE = {"num_attention_heads": 4, "max_position_embeddings": 512}


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the means to make its classifier.

    Args:
        description: a few words for the result table.
        remark: a sentence for the log: which encoder this is, and why if it is not the one asked for.
        pretrained: whether the weights are worth freezing.
        tokenizer: a ``BertTokenizer``.
        make_model: makes a ``BertForSequenceClassification`` with this many labels; the same weights every time when
            pretrained, apart from the head, which follows Paddle's seed.
    """

    description: str
    remark: str
    pretrained: bool
    tokenizer: Any
    make_model: Callable[[int], Any]


def load_encoder(name: str, texts: Sequence[str], scratch_dir: Path) -> Encoder:
    """Load the encoder called ``name``.

    Args:
        name: ``minilm-l6`` or ``scratch``.
        texts: the training texts, of which a vocabulary is made when nothing better can be had.
        scratch_dir: where that vocabulary is written.
    """
    if name == "scratch":
        return _scratch_encoder(texts, scratch_dir, "small, from scratch", "a small BERT from scratch, as asked for")
    try:
        folder = build_minilm()
    except DataUnavailable as error:
        remark = f"NOT MiniLM-L6 but a small BERT from scratch, which will do much worse, because: {error}"
        return _scratch_encoder(texts, scratch_dir, "FROM SCRATCH (no MiniLM-L6)", remark)
    return _minilm_encoder(folder)


def _minilm_encoder(folder: Path) -> Encoder:
    from paddlenlp.transformers import BertForSequenceClassification, BertTokenizer

    def make_model(labels: int) -> Any:
        return BertForSequenceClassification.from_pretrained(str(folder), num_labels=labels)

    tokenizer = BertTokenizer.from_pretrained(str(folder))
    return Encoder("MiniLM-L6", f"MiniLM-L6, pre-trained, from {folder}", True, tokenizer, make_model)


def _scratch_encoder(texts: Sequence[str], scratch_dir: Path, description: str, remark: str) -> Encoder:
    from paddlenlp.transformers import BertTokenizer

    vocabulary = make_vocabulary(texts, _SCRATCH_VOCABULARY)
    scratch_dir.mkdir(parents=True, exist_ok=True)
    # Several processes of a cluster may do this at once: each renames a complete file into place.
    part = scratch_dir / f".vocab-{os.getpid()}"
    part.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    part.replace(scratch_dir / "vocab.txt")

    tokenizer = BertTokenizer(str(scratch_dir / "vocab.txt"), do_lower_case=True)

    def make_model(labels: int) -> Any:
        return small_bert(len(vocabulary), labels)

    return Encoder(description, remark, False, tokenizer, make_model)


def small_bert(tokens: int, labels: int, layers: int = 2, width: int = 128) -> Any:
    """A ``BertForSequenceClassification`` from scratch, with random weights that follow Paddle's seed.

    Args:
        tokens: of its vocabulary.
        labels: that it tells apart.
        layers: of the encoder.
        width: of its hidden states, a multiple of 4.
    """
    from paddlenlp.transformers import BertConfig, BertForSequenceClassification

    shape = {**_SCRATCH_SHAPE, "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width}
    return BertForSequenceClassification(BertConfig(vocab_size=tokens, num_labels=labels, **shape))


def make_vocabulary(texts: Sequence[str], size: int) -> list[str]:
    """Word pieces: the characters, alone and as continuations, and the commonest words.

    Unlike a trained word-piece vocabulary it depends on nothing but the texts, so every cluster makes the same one.

    Example:
        >>> make_vocabulary(["ab ab c"], size=100)[5:]
        ['a', 'b', 'c', '##a', '##b', '##c', 'ab']
    """
    words = Counter(word for text in texts for word in "".join(c if c.isalnum() else " " for c in text.lower()).split())
    characters = sorted({c for text in texts for c in text.lower() if not c.isspace()})
    pieces = [*_SPECIAL, *characters, *(f"##{c}" for c in characters)]
    common = sorted((word for word in words if len(word) > 1), key=lambda word: (-words[word], word))
    return pieces + common[: max(0, size - len(pieces))]
