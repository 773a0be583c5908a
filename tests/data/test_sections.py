"""The section task: the rules by which it is made hold for the files that ship."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.help_pages import Block, is_sentence
from paddlenlp_nebula.data.sections import (
    DEV_PER_SECTION,
    FEWEST_TRAIN_PER_SECTION,
    SECTIONS,
    TRAIN_PER_SECTION,
    build_sections,
    choose_examples,
    read_examples,
)
from tests.data.help_folder import make_help_folder

SAMPLE = Path(__file__).parents[2] / "recipes" / "data" / "libreoffice_help_sections"


def test_shipped_sample_keeps_the_rules() -> None:
    train, dev = read_examples(SAMPLE / "train.tsv"), read_examples(SAMPLE / "dev.tsv")
    assert (len(train), len(dev)) == (3162, 504)
    assert not {example.page for example in train} & {example.page for example in dev}
    texts = [example.text for example in train + dev]
    assert len(texts) == len(set(texts))
    assert all(map(is_sentence, texts))
    for example in train + dev:
        assert SECTIONS[example.page.split("/")[0]] == example.section
    assert set(Counter(example.section for example in dev).values()) == {DEV_PER_SECTION}
    assert max(Counter(example.section for example in dev[:70]).values()) < 20  # the beginning is mixed
    counts = Counter(example.section for example in train)
    assert set(counts) == set(SECTIONS.values())
    assert all(FEWEST_TRAIN_PER_SECTION <= count <= TRAIN_PER_SECTION for count in counts.values())


def test_shipped_sample_has_its_licence_and_is_small() -> None:
    notice = (SAMPLE / "NOTICE").read_text()
    manifest = json.loads((SAMPLE / "manifest.json").read_text())
    assert manifest["version"] in notice
    assert "nebula data libreoffice-help-sections --output recipes/data/libreoffice_help_sections" in notice
    assert "Mozilla Public License Version 2.0" in (SAMPLE / "LICENSE-MPL-2.0").read_text()[:200]
    for name in ("train.tsv", "dev.tsv"):
        assert hashlib.sha256((SAMPLE / name).read_bytes()).hexdigest() == manifest["sha256"][name]
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 600_000


def test_ambiguous_sentences_are_left_out() -> None:
    blocks = [
        Block("swriter/a.html", "1", "Only in the Writer help."),
        Block("swriter/a.html", "2", "In two of the sections."),
        Block("scalc/b.html", "2", "In two of the sections."),
        Block("swriter/a.html", "3", "Also on a shared page."),
        Block("shared/c.html", "3", "Also on a shared page."),
        Block("shared/c.html", "4", "On a shared page only."),
    ]
    train, dev = choose_examples(blocks)
    assert [example.text for example in train + dev] == ["Only in the Writer help."]


def test_rebuilding_gives_the_same_files(tmp_path: Path) -> None:
    source = make_help_folder(tmp_path / "source")
    first = build_sections(from_dir=source, output=tmp_path / "first")
    second = build_sections(from_dir=source, cache=tmp_path / "cache")
    assert second == tmp_path / "cache" / "libreoffice-help-sections"
    for name in ("train.tsv", "dev.tsv", "manifest.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    train, dev = read_examples(first / "train.tsv"), read_examples(first / "dev.tsv")
    assert not {example.page for example in train} & {example.page for example in dev}


def test_too_little_text_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_help_folder(tmp_path / "source", pages=4)
    with pytest.raises(DataUnavailable, match="at least 250 training sentences for Writer"):
        build_sections(from_dir=source, cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize("content", ["", "Writer\tonly two\n", "Writer\tpage\t\n"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(content)
    with pytest.raises(DataUnavailable, match=r"train\.tsv"):
        read_examples(path)
