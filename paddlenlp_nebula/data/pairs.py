"""English-German sentence pairs of the LibreOffice help, to learn to translate from: train, dev and test.

The split is by page. A sentence that is on training pages is taken from dev and test, whatever its case, digits and
punctuation, and so is one whose translation is; what is on dev pages is taken from test. Everything is chosen by hash:
the same package gives the same files, and another release changes few lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.help_pages import Block, is_sentence, read_blocks
from paddlenlp_nebula.data.libreoffice import LICENCE, open_help_pages
from paddlenlp_nebula.data.tables import read_rows

__all__ = ["PARTS", "SAMPLE_PAIRS", "Pair", "build_pairs", "choose_pairs", "read_pairs"]

PARTS = ("train", "dev", "test")
_HELD_OUT_IN_100 = {"dev": 5, "test": 5}  # of the pages
SAMPLE_PAIRS = {"train": 800, "dev": 80, "test": 80}
FEWEST_PAIRS = {"train": 15_000, "dev": 500, "test": 500}
_MOST_TARGET_WORDS = 80
_MOST_TIMES_LONGER = 2.5  # in characters, either way; beyond that it is hardly a translation
_SHORT = 20  # characters, below which a ratio says nothing


class Pair(NamedTuple):
    """A sentence, its translation, and the page they are from; the columns of the TSV files."""

    page: str
    english: str
    german: str


def choose_pairs(english: Iterable[Block], german: Iterable[Block]) -> dict[str, list[Pair]]:
    """The pairs among the blocks of both languages, by part, each in an order without meaning.

    Blocks are aligned by page and id. An English sentence occurs once, with the translation that is met first.
    """
    translation = {(block.page, block.key): block.text for block in german}
    parts: dict[str, list[Pair]] = {part: [] for part in PARTS}
    for block in english:
        pair = Pair(block.page, block.text, translation.get((block.page, block.key), block.text))
        if _is_good(pair):
            parts[_part_of(block.page)].append(pair)
    taken: set[str] = set()
    for part in PARTS:
        fresh = [pair for pair in parts[part] if taken.isdisjoint((_gist(pair.english), _gist(pair.german)))]
        taken |= {_gist(text) for pair in parts[part] for text in (pair.english, pair.german)}
        once = {pair.english: pair for pair in reversed(fresh)}
        parts[part] = sorted(once.values(), key=lambda pair: _draw(f"order {pair.english}"))
    return parts


def _is_good(pair: Pair) -> bool:
    shorter, longer = sorted((len(pair.english), len(pair.german)))
    return (
        is_sentence(pair.english)
        and pair.english != pair.german  # else it is not translated
        and len(pair.german.split()) <= _MOST_TARGET_WORDS
        and (longer <= _SHORT or longer <= _MOST_TIMES_LONGER * shorter)
    )


def _part_of(page: str) -> str:
    number = _draw(page) % 100
    for part, share in _HELD_OUT_IN_100.items():
        if number < share:
            return part
        number -= share
    return "train"


def _gist(text: str) -> str:
    """What two sentences that only differ in case, digits or punctuation have in common; all of it if no letter is."""
    return "".join(filter(str.isalpha, text)).casefold() or text


def _draw(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def build_pairs(*, cache: Path | None = None, from_dir: Path | None = None, output: Path | None = None) -> Path:
    """Write ``train.tsv``, ``dev.tsv`` and ``test.tsv`` (columns page, English, German) and return their folder.

    Args:
        cache: cache folder, see ``cache_root``.
        from_dir: an unpacked help folder with both languages to use instead of fetching.
        output: write a sample there, the first ``SAMPLE_PAIRS`` of each part, beside what it already holds.

    Raises:
        DataUnavailable: the help cannot be had, or gives fewer than ``FEWEST_PAIRS``.
    """

    def build(folder: Path) -> None:
        with open_help_pages(["en-us", "de"], from_dir) as pages:
            parts = choose_pairs(*(read_blocks(pages.text_dirs[language]) for language in ("en-us", "de")))
        _check(parts)
        for part, pairs in parts.items():
            parts[part] = pairs = pairs[: SAMPLE_PAIRS[part] if output else None]
            (folder / f"{part}.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs), encoding="utf-8")
        Manifest(
            name="libreoffice-help-en-de",
            package="libreoffice-help-en-us, libreoffice-help-de",
            version=pages.version,
            licence=LICENCE,
            counts={part: len(pairs) for part, pairs in parts.items()},
        ).write(folder, "*.tsv")

    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        build(output)
        return output
    return publish(cache_root(cache) / "libreoffice-help-en-de", build, replace=from_dir is not None)


def _check(parts: dict[str, list[Pair]]) -> None:
    for part, fewest in FEWEST_PAIRS.items():
        if len(parts[part]) < fewest:
            raise DataUnavailable(
                f"expected at least {fewest:,} sentence pairs in {part}, found {len(parts[part]):,}: the help pages "
                "have another layout than this version knows, or a language is incomplete"
            )


def read_pairs(path: Path) -> Sequence[Pair]:
    """The pairs of a TSV file with the columns page (or other source), English and German.

    Raises:
        DataUnavailable: the file is missing or empty, or a line has other than three columns.
    """
    return read_rows(path, Pair, "page, English and German", "sentence pairs")
