"""Makes a folder laid out like an unpacked LibreOffice help, with made-up text."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("swriter", "scalc", "simpress", "sdatabase", "smath", "schart", "sbasic", "shared")


def make_help_folder(root: Path, *, pages: int = 60, sentences: int = 8, language: str = "en-US") -> Path:
    """Write ``pages`` pages of ``sentences`` sentences for each section below ``root/help/LANGUAGE/text``."""
    for folder in FOLDERS:
        text_dir = root / "help" / language / "text" / folder / "01"
        text_dir.mkdir(parents=True)
        for page in range(pages):
            blocks = [
                f'<p id="par{number}">{language} sentence {number} of page {page} about {folder}.</p>'
                for number in range(sentences)
            ]
            shared = '<p id="everywhere">This sentence is on every single page.</p><p id="button">OK</p>'
            (text_dir / f"{page}.html").write_text("".join(blocks) + shared, encoding="utf-8")
    return root
