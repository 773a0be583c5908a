"""What the documentation says can be executed: Python blocks and command lines, found in all of its pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paddlenlp_nebula

__all__ = ["REPO", "Command", "Snippet", "commands", "pages", "snippets"]

REPO = Path(paddlenlp_nebula.__file__).parents[1]
_FENCE = re.compile(r"^```(\w*)\s*$")
_SHELL = ("sh", "bash", "console", "shell", "")  # most blocks without a language are commands here
_MARKS = {"<!-- run -->": "run", "<!-- continue -->": "continue"}


@dataclass(frozen=True)
class Block:
    """Text between two fences, or indented by four spaces.

    Attributes:
        place: page and line, for people.
        mark: ``run`` or ``continue``, from the comment on the line before; else empty.
    """

    place: str
    language: str
    mark: str
    text: str


@dataclass(frozen=True)
class Snippet:
    """Python of the documentation: a block, with those in front of it that it continues."""

    place: str
    mark: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command line of the documentation, as words without comments and variables."""

    place: str
    words: tuple[str, ...]


def pages() -> list[Path]:
    """Every page, wherever it is."""
    return [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")), *sorted((REPO / "recipes").rglob("*.md"))]


def snippets() -> list[Snippet]:
    """All Python blocks."""
    found: list[Snippet] = []
    for page in pages():
        for block in _blocks(page):
            if block.language == "python":
                before = f"{found[-1].text}\n\n" if block.mark == "continue" else ""
                found.append(Snippet(block.place, block.mark, before + block.text))
    return found


def commands(program: str) -> list[Command]:
    """All command lines that call ``program``, those in the heads of recipes included."""
    found = []
    for page in pages():
        for block in _blocks(page):
            if block.language in _SHELL:
                found += [Command(block.place, words) for words in _calls(block.text, program)]
    for recipe in sorted((REPO / "recipes").glob("*.yaml")):
        for number, line in enumerate(recipe.read_text(encoding="utf-8").splitlines(), start=1):
            if match := re.match(rf"#( Run:)?\s+({program} .*)", line):
                place = f"{recipe.relative_to(REPO)}:{number}"
                found += [Command(place, words) for words in _calls(match[2], program)]
    return found


def _calls(text: str, program: str) -> Iterator[tuple[str, ...]]:
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(rf"(^|[\s/]){program}\s", line):
            continue
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;"):
                if words or not re.match(r"\w+=", word):  # A=B in front of a command
                    words.append(word)
                continue
            if words and words[0].rpartition("/")[2] == program:
                yield tuple(words[1:])
            words = []


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    place, language, mark, text = "", None, "", []
    for number, line in enumerate([*lines, ""], start=1):
        fence = _FENCE.match(line)
        if language is None and fence:
            before = next((above for above in reversed(lines[: number - 1]) if above.strip()), "")
            place, mark = f"{page.relative_to(REPO)}:{number}", _MARKS.get(before.strip(), "")
            language, text = fence[1], []
        elif fence:
            yield Block(place, str(language), mark, "\n".join(text))
            language = None
        elif language is not None:
            text.append(line)
        elif line.startswith("    "):
            yield Block(f"{page.relative_to(REPO)}:{number}", "", "", line.strip())
    assert language is None, f"{place}: a block without an end"
