"""Text for pre-training: documents, which of them are held out for evaluation, and blocks of bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from paddle.io import Dataset

from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.libreoffice import build_help
from paddlenlp_nebula.data.sections import read_examples
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe.sentences import find_data

__all__ = ["END", "IGNORED", "START", "VOCABULARY", "Blocks", "Corpus", "Document", "load_corpus", "pack", "split"]

# A token is a byte of UTF-8, or one of these.
START, END = 256, 257
VOCABULARY = 258
IGNORED = -100  # what PaddleNLP's criteria leave out of the loss

HELP, SAMPLE = "libreoffice-help", "sample"
_SAMPLE_DIR = "libreoffice_help_sections"

Tokens: TypeAlias = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Document:
    """A text that belongs together.

    Args:
        name: decides, by its hash, whether the document is held out.
        content: in UTF-8.
    """

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """What is to be read.

    Args:
        title: two or three words, for the table at the end.
        documents: in the order in which they are read.
        version: of the package that it is from; empty if unknown.
        lacking: why this is not the text that was asked for; empty if it is.
    """

    title: str
    documents: Sequence[Document]
    version: str = ""
    lacking: str = ""


def load_corpus(text: str) -> Corpus:
    """The text that a recipe names.

    Args:
        text: ``libreoffice-help``, fetched on first use; if it cannot be had, the sample takes its place and
            ``lacking`` says so. ``sample``: the sentences that come with the package. Else a folder: every .txt
            file in it, at any depth, is a document.

    Raises:
        ConfigurationError: there is no such text.
    """
    if text == HELP:
        try:
            return _help()
        except DataUnavailable as error:
            return _sample(lacking=str(error))
    if text == SAMPLE:
        return _sample()
    folder = Path(text)
    files = sorted(folder.rglob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ConfigurationError([f"text must be {HELP!r}, {SAMPLE!r} or a folder with .txt files, got {text!r}"])
    documents = [Document(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files]
    return Corpus(f"{folder.name}, {len(files):,} files", documents)


def split(documents: Sequence[Document], held_out_percent: float) -> tuple[list[Document], list[Document]]:
    """The documents to train on, in their order, and those held out, in the order of their names' hashes.

    A share of whole documents is held out, at least one. In the order of the hashes the first ones are of all kinds,
    so that a part of them can stand for all.

    Raises:
        NebulaError: there are fewer than two documents.
    """
    if len(documents) < 2:
        raise NebulaError(
            f"expected at least two documents, one of them to evaluate on, got {len(documents)}: cut the text into "
            "several .txt files"
        )
    ranked = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    count = min(len(documents) - 1, math.ceil(len(documents) * held_out_percent / 100))
    held_out = ranked[:count]
    names = {document.name for document in held_out}
    return [document for document in documents if document.name not in names], held_out


def pack(documents: Iterable[Document], length: int) -> Tokens:
    """All bytes of all documents, each document followed by END, cut into blocks; none is lost, none occurs twice.

    Args:
        documents: in order.
        length: tokens per block.

    Returns:
        Shape (blocks, length). The last block is filled up with IGNORED.
    """
    parts: list[Tokens] = []
    for document in documents:
        parts += [np.frombuffer(document.content, dtype=np.uint8).astype(np.int16), np.array([END], dtype=np.int16)]
    flat = np.concatenate(parts) if parts else np.empty(0, dtype=np.int16)
    blocks = np.full(math.ceil(len(flat) / length) * length, IGNORED, dtype=np.int16)
    blocks[: len(flat)] = flat
    return blocks.reshape(-1, length)


class Blocks(Dataset):
    """Blocks as a causal language model wants them: from START and the tokens before it, predict each token.

    So every token is predicted once, and whoever holds a block holds no part of another.

    Args:
        tokens: what `pack` returns, or some rows of it.
    """

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``input_ids`` and ``labels``, int64, shape (length,)."""
        labels = self.tokens[index].astype(np.int64)
        inputs = np.concatenate([[START], labels[:-1]])
        return {"input_ids": np.where(inputs == IGNORED, END, inputs), "labels": labels}


def _help() -> Corpus:
    folder = build_help(["en-us"])
    pages: dict[str, list[str]] = {}
    for line in (folder / "blocks_en-us.tsv").read_text(encoding="utf-8").splitlines():
        page, _, text = line.split("\t")
        pages.setdefault(page, []).append(text)
    return Corpus("LibreOffice help", _documents(pages), Manifest.read(folder).version)


def _sample(lacking: str = "") -> Corpus:
    folder = find_data(_SAMPLE_DIR)
    pages: dict[str, list[str]] = {}
    for example in (*read_examples(folder / "train.tsv"), *read_examples(folder / "dev.tsv")):
        pages.setdefault(example.page, []).append(example.text)
    title = "ONLY A SAMPLE" if lacking else "sample"
    return Corpus(title, _documents(pages), Manifest.read(folder).version, lacking)


def _documents(pages: dict[str, list[str]]) -> list[Document]:
    return [Document(page, "\n".join(texts).encode()) for page, texts in pages.items()]
