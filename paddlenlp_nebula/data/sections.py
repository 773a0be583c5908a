"""A classification task from LibreOffice help: which application is a sentence about?

The label of a sentence is the folder of its page. Pages about all applications are left out, so is a sentence that
occurs in two sections. The split is by page and everything is chosen by hash: the same package gives the same files,
and another release changes few lines.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.help_pages import Block, is_sentence, read_blocks
from paddlenlp_nebula.data.libreoffice import LICENCE, open_help_pages
from paddlenlp_nebula.data.tables import read_rows

__all__ = ["SECTIONS", "Example", "build_sections", "choose_examples", "read_examples"]

# Folder of the help -> label, in the order of the label ids. Draw is missing: it has too few sentences of its own.
SECTIONS = {
    "swriter": "Writer",
    "scalc": "Calc",
    "simpress": "Impress",
    "sdatabase": "Base",
    "smath": "Math",
    "schart": "Chart",
    "sbasic": "Basic",
}
TRAIN_PER_SECTION = 500
DEV_PER_SECTION = 72
FEWEST_TRAIN_PER_SECTION = 250
DEV_PAGES_IN_100 = 18


class Example(NamedTuple):
    """A labelled sentence and the page it is from; the columns of the TSV files."""

    section: str
    page: str
    text: str


def choose_examples(blocks: Iterable[Block]) -> tuple[list[Example], list[Example]]:
    """The training and evaluation examples among the blocks of the English help."""
    pages_of: dict[str, list[str]] = defaultdict(list)
    for block in blocks:
        if is_sentence(block.text):
            pages_of[block.text].append(block.page)
    parts: dict[tuple[str, bool], list[Example]] = defaultdict(list)
    for text, pages in pages_of.items():
        sections = {SECTIONS.get(page.split("/")[0], "") for page in pages}
        on_dev = {_draw(page) % 100 < DEV_PAGES_IN_100 for page in pages}
        if len(sections) == len(on_dev) == 1 and "" not in sections:
            example = Example(sections.pop(), pages[0], text)
            parts[example.section, on_dev.pop()].append(example)
    return _take(parts, on_dev=False, most=TRAIN_PER_SECTION), _take(parts, on_dev=True, most=DEV_PER_SECTION)


def _draw(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _take(parts: dict[tuple[str, bool], list[Example]], *, on_dev: bool, most: int) -> list[Example]:
    chosen = []
    for section in SECTIONS.values():
        chosen += sorted(parts[section, on_dev], key=lambda example: _draw(example.text))[:most]
    # Another hash for the order: by the first one, the sections with most sentences would come first.
    return sorted(chosen, key=lambda example: _draw(f"order {example.text}"))


def build_sections(*, cache: Path | None = None, from_dir: Path | None = None, output: Path | None = None) -> Path:
    """Write ``train.tsv`` and ``dev.tsv`` (columns section, page, text) and return their folder.

    Args:
        cache: cache folder, see ``cache_root``.
        from_dir: an unpacked help folder to use instead of fetching.
        output: write the files there, beside what it already holds, rather than into the cache.
    """

    def build(folder: Path) -> None:
        with open_help_pages(["en-us"], from_dir) as pages:
            train, dev = choose_examples(read_blocks(pages.text_dirs["en-us"]))
        _check(train)
        for name, examples in (("train", train), ("dev", dev)):
            lines = ["\t".join(example) + "\n" for example in examples]
            (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        Manifest(
            name="libreoffice-help-sections",
            package="libreoffice-help-en-us",
            version=pages.version,
            licence=LICENCE,
            counts={"train": len(train), "dev": len(dev)},
        ).write(folder, "*.tsv")

    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        build(output)
        return output
    return publish(cache_root(cache) / "libreoffice-help-sections", build, replace=from_dir is not None)


def _check(train: Sequence[Example]) -> None:
    found = Counter(example.section for example in train)
    for section in SECTIONS.values():
        if found[section] < FEWEST_TRAIN_PER_SECTION:
            raise DataUnavailable(
                f"expected at least {FEWEST_TRAIN_PER_SECTION} training sentences for {section}, found "
                f"{found[section]}: the help pages have another layout than this version knows, or are incomplete"
            )


def read_examples(path: Path) -> list[Example]:
    """The examples of a TSV file with the columns section, page and text.

    Raises:
        DataUnavailable: if the file is missing or a line has other than three columns.
    """
    return read_rows(path, Example, "section, page and text", "examples")
