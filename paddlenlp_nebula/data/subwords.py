"""A subword tokenizer trained on the user's own text: every site makes the same one of the same text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from paddlenlp_nebula.data.cache import cache_root, publish

__all__ = ["build_subwords", "load_subwords"]

_FILE = "spiece.model"


def build_subwords(texts: Sequence[str], pieces: int, *, cache: Path | None = None) -> Path:
    """Train a unigram model with sentencepiece, cache it as PaddleNLP's T5Tokenizer, and return the folder.

    Source: T. Kudo, "Subword Regularization" (2018), section 3.2.

    Args:
        texts: sentences in a fixed order, of all languages that are to be read and written.
        pieces: how many tokens there are to be, the special ones included; a small text gives fewer.
        cache: cache folder, see ``cache_root``; one folder per text and number of pieces.
    """
    digest = xxhash.xxh3_64_hexdigest("\n".join(texts).encode())

    def build(folder: Path) -> None:
        import sentencepiece

        with io.BytesIO() as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                model_type="unigram",
                vocab_size=pieces,
                hard_vocab_limit=False,
                normalization_rule_name="identity",  # what is written comes out as it was
                character_coverage=1.0,  # help is full of rare characters that matter: brackets, the percent sign
                pad_id=0,  # the special tokens as T5 has them, which starts its targets with the padding
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                num_threads=1,  # sums of floating-point numbers depend on it
                minloglevel=2,
            )
            (folder / _FILE).write_bytes(model.getvalue())
        _tokenizer(folder / _FILE).save_pretrained(str(folder))

    return publish(cache_root(cache) / "subwords" / f"{pieces}-{digest}", build)


def load_subwords(folder: Path) -> Any:
    """The T5Tokenizer in a folder of `build_subwords`, or one that a model was saved in."""
    return _tokenizer(folder / _FILE)


def _tokenizer(file: Path) -> Any:
    from paddlenlp.transformers import T5Tokenizer

    return T5Tokenizer(str(file), extra_ids=0)
