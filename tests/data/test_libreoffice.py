"""Fetching and aligning the LibreOffice help, with stand-ins for the system's clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_nebula.data import libreoffice
from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable, run_client
from paddlenlp_nebula.data.help_pages import Block
from paddlenlp_nebula.data.libreoffice import align, build_help, open_help_pages
from tests.data.help_folder import make_help_folder

APT = """#!/bin/sh
touch "$2_9.9_all.deb"
"""
DPKG = """#!/bin/sh
if [ "$1" = -f ]; then echo 9.9; else cp -r "$HELP_SOURCE/help" .; fi
"""


@pytest.fixture
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {language: (folder, 10) for language, (folder, _) in libreoffice.LANGUAGES.items()}
    monkeypatch.setattr(libreoffice, "LANGUAGES", few)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for apt-get and dpkg-deb, in front of the real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_alignment_drops_untranslated_and_repeated_text() -> None:
    english = [
        Block("p", "1", "Press the left key."),
        Block("p", "2", "Press the left key."),
        Block("p", "3", "This is not translated yet."),
        Block("p", "4", "Only in the English help."),
        Block("p", "5", "Short"),
        Block("q", "1", "Another page, the same id."),
    ]
    german = [
        Block("p", "1", "Links drücken."),
        Block("p", "2", "Links drücken."),
        Block("p", "3", "This is not translated yet."),
        Block("p", "5", "Kurz"),
    ]
    assert align(english, german) == [("Press the left key.", "Links drücken.")]


@pytest.mark.usefixtures("few_are_enough", "clients")
def test_fetch_extract_count_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_help_folder(tmp_path / "source", pages=2)
    make_help_folder(source, pages=2, language="de")
    monkeypatch.setenv("HELP_SOURCE", str(source))
    folder = build_help(["de"], cache=tmp_path / "cache")
    manifest = Manifest.read(folder)
    assert manifest.version == "9.9"
    assert manifest.counts == {"blocks_en-us": 160, "blocks_de": 160, "pairs_en-us_de": 128}
    assert set(manifest.sha256) == {"blocks_en-us.tsv", "blocks_de.tsv", "pairs_en-us_de.tsv"}
    monkeypatch.setenv("PATH", "")
    assert build_help(["de"], cache=tmp_path / "cache") == folder


def test_too_few_blocks_are_an_error(tmp_path: Path) -> None:
    source = make_help_folder(tmp_path / "source", pages=2)
    with pytest.raises(DataUnavailable, match="at least 30,000 rows in blocks_en-us, extracted 160"):
        build_help([], cache=tmp_path / "cache", from_dir=source)


def test_a_folder_without_the_language_is_an_error(tmp_path: Path) -> None:
    source = make_help_folder(tmp_path / "source", pages=1)
    with open_help_pages(["en-us"], source / "help" / "en-US") as pages:
        assert pages.text_dirs["en-us"] == source / "help" / "en-US" / "text"
    with pytest.raises(DataUnavailable, match="fr/text"), open_help_pages(["fr"], source):
        pass
    with pytest.raises(DataUnavailable, match="got klingon"), open_help_pages(["klingon"], source):
        pass


def test_a_missing_or_failing_client_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match=r"cannot fetch it: the program 'no-such-client' .* do without"):
        run_client(["no-such-client"], folder=tmp_path, purpose="fetch it", otherwise="do without")
    failing = ["sh", "-c", "echo first >&2; echo no such package >&2; exit 3"]
    with pytest.raises(DataUnavailable, match=r"ended with 3 and said 'no such package'; do without"):
        run_client(failing, folder=tmp_path, purpose="fetch it", otherwise="do without")
