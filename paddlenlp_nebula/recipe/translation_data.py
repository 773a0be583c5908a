"""Sentence pairs for the recipes that translate: where they are from, and batches of them with little padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from paddle.io import Dataset

from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.pairs import PARTS, Pair, build_pairs, read_pairs
from paddlenlp_nebula.distill.losses.divergence import IGNORED
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["Batches", "Collator", "Corpus", "encode", "load_corpus", "pad"]

HELP, SAMPLE = "libreoffice-help", "sample"
_PACKAGE = Path(__file__).parents[1]
_SAMPLE_DIRS = [
    folder / "data" / "libreoffice_help_en_de" for folder in (_PACKAGE / "shipped_recipes", _PACKAGE.parent / "recipes")
]

Row: TypeAlias = tuple[list[int], list[int]]  # token ids of a sentence and of its translation


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs to learn from, to choose by, and to report on.

    Attributes:
        title: two or three words, for the table at the end.
        parts: pairs of ``train``, ``dev`` and ``test``.
        version: of the package that they are from; empty if unknown.
        lacking: why these are not the pairs that were asked for; empty if they are.
    """

    title: str
    parts: Mapping[str, Sequence[Pair]]
    version: str = ""
    lacking: str = ""

    @property
    def texts(self) -> list[str]:
        """All training sentences of both languages: what a tokenizer may be trained on."""
        return [text for pair in self.parts["train"] for text in (pair.english, pair.german)]


def load_corpus(pairs: str) -> Corpus:
    """The sentence pairs that a recipe names.

    Args:
        pairs: ``libreoffice-help``, fetched on first use; if it cannot be had, the sample takes its place and
            ``lacking`` says so. ``sample``: the pairs that come with the package. Else a folder with train.tsv, dev.tsv
            and test.tsv (columns page or other source, English, German; they may be other languages).

    Raises:
        ConfigurationError: there are no such pairs.
        DataUnavailable: a file of the folder is not what it should be.
    """
    if pairs == HELP:
        try:
            return _read(build_pairs(), "LibreOffice help")
        except DataUnavailable as error:
            return _read(_sample_dir(), "ONLY A SAMPLE", str(error))
    if pairs == SAMPLE:
        return _read(_sample_dir(), "sample")
    if not (Path(pairs) / "train.tsv").is_file():
        raise ConfigurationError(
            [f"pairs must be {HELP!r}, {SAMPLE!r} or a folder with train.tsv, dev.tsv and test.tsv, got {pairs!r}"]
        )
    return _read(Path(pairs), Path(pairs).name)


def _sample_dir() -> Path:
    return next(folder for folder in _SAMPLE_DIRS if folder.is_dir())


def _read(folder: Path, title: str, lacking: str = "") -> Corpus:
    parts = {part: read_pairs(folder / f"{part}.tsv") for part in PARTS}
    version = Manifest.read(folder).version if (folder / "manifest.json").is_file() else ""
    return Corpus(title, parts, version, lacking)


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a sentence's tokens, the end token among them."""
    return [int(token) for token in tokenizer(text)["input_ids"]]


class Batches(Dataset):
    """A dataset of which each item is a whole batch: pairs of similar length, about as many tokens in each.

    Of single pairs in a random order, more than half of a batch would be padding. What is together in a batch does not
    change from epoch to epoch; the order of the batches does.

    Args:
        pairs: in any order.
        tokenizer: one of PaddleNLP's.
        max_length: pairs of which a side has more tokens are left out: a translation that is cut teaches to stop early.
        batch_tokens: of both sides together, padding included; at least one pair is in a batch.

    Attributes:
        batches: rows of token ids.
        left_out: how many pairs were too long.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, max_length: int, batch_tokens: int) -> None:
        super().__init__()
        rows = [(encode(tokenizer, pair.english), encode(tokenizer, pair.german)) for pair in pairs]
        short = [row for row in rows if max(map(len, row)) <= max_length]
        self.left_out = len(rows) - len(short)
        self.batches = _pack(sorted(short, key=lambda row: (max(map(len, row)), row)), batch_tokens)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Row]:
        """The rows of one batch."""
        return self.batches[index]

    @property
    def rows(self) -> int:
        """Pairs in all batches."""
        return sum(map(len, self.batches))


def _pack(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    batches: list[list[Row]] = []
    widths = (0, 0)
    for row in rows:
        grown = (max(widths[0], len(row[0])), max(widths[1], len(row[1])))
        if batches and (len(batches[-1]) + 1) * sum(grown) <= batch_tokens:
            batches[-1].append(row)
            widths = grown
        else:
            batches.append([row])
            widths = (len(row[0]), len(row[1]))
    return batches


@dataclass(frozen=True)
class Collator:
    """From items of `Batches` to what an encoder with a decoder takes.

    Attributes:
        padding: id of the padding, which the decoder's inputs start with, too, as T5's do.
    """

    padding: int

    def __call__(self, items: Sequence[Sequence[Row]]) -> dict[str, npt.NDArray[np.int64]]:
        """Rows of all items: ``input_ids``, ``attention_mask``, ``decoder_input_ids`` and ``labels``.

        All int64, shape (rows, longest sentence) or (rows, longest translation); labels are `IGNORED` behind the end.
        """
        rows = [row for item in items for row in item]
        ids, mask = pad([source for source, _ in rows], self.padding)
        labels, _ = pad([target for _, target in rows], IGNORED)
        shifted, _ = pad([[self.padding, *target[:-1]] for _, target in rows], self.padding)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": shifted, "labels": labels}


def pad(sequences: Sequence[Sequence[int]], filling: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sequences of unlike lengths in one array, shape (sequences, longest), and 1 where they are, 0 behind them."""
    shape = (len(sequences), max(map(len, sequences)))
    ids, mask = np.full(shape, filling, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask
