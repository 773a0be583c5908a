"""Reads the text blocks of LibreOffice help pages (HTML), keyed by the ids that all languages share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "is_sentence", "read_blocks", "read_page"]

_BLOCKS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6"})
_SENTENCE_END = (".", ":", "!", "?")


class Block(NamedTuple):
    """One paragraph or heading.

    Args:
        page: path of its page below the help folder's ``text``, with forward slashes.
        key: the element's id, the same in every language.
        text: its text on one line, single-spaced.
    """

    page: str
    key: str
    text: str


def is_sentence(text: str) -> bool:
    """Whether an English block reads like a sentence: 4 to 60 words, ending in ``. : !`` or ``?``.

    Example:
        >>> is_sentence("Choose the command that you want."), is_sentence("Insert - Footnote")
        (True, False)
    """
    return 4 <= len(text.split()) <= 60 and text.endswith(_SENTENCE_END)


class _PageReader(HTMLParser):
    """Collects (id, text) of the blocks of one page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str]] = []
        self._key: str | None = None
        self._text: list[str] | None = None
        self._hidden_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self._finish()
            self._text, self._key = [], dict(attrs).get("id")
        elif tag == "a" and self._text is not None and self._key is None:
            self._key = dict(attrs).get("id") or dict(attrs).get("name")
        elif tag == "br" and self._text is not None:
            self._text.append(" ")
        elif tag == "span" and self._text is not None and (self._hidden_depth or dict(attrs).get("class") == "MAC"):
            # The page carries both spellings of a menu path and hides one with CSS; kept, they would run together.
            self._hidden_depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._finish()
        elif tag == "span" and self._hidden_depth:
            self._hidden_depth -= 1

    def handle_data(self, data: str) -> None:
        if self._text is not None and not self._hidden_depth:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._finish()

    def _finish(self) -> None:
        if self._text is not None and self._key:
            text = re.sub(r"\s+", " ", "".join(self._text)).strip()
            if text:
                self.found.append((self._key, text))
        self._text, self._key, self._hidden_depth = None, None, 0


def read_page(html: str) -> list[tuple[str, str]]:
    """The (id, text) pairs of one page, in reading order.

    Example:
        >>> read_page('<p id="a">Press <span class="MAC">Cmd</span><span class="UNIX">Ctrl</span> now.</p><p>No id</p>')
        [('a', 'Press Ctrl now.')]
    """
    reader = _PageReader()
    reader.feed(html)
    reader.close()
    return reader.found


def read_blocks(text_dir: Path) -> Iterator[Block]:
    """All blocks of the pages under ``text_dir``, page by page in name order."""
    for path in sorted(text_dir.rglob("*.html")):
        page = path.relative_to(text_dir).as_posix()
        for key, text in read_page(path.read_text(encoding="utf-8")):
            yield Block(page, key, text)
