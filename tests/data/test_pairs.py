"""Sentence pairs to learn to translate from: nothing of dev or test can be learnt by heart, and what ships keeps that."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paddlenlp_nebula.data import pairs as module
from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.help_pages import Block, is_sentence
from paddlenlp_nebula.data.pairs import PARTS, SAMPLE_PAIRS, Pair, build_pairs, choose_pairs, read_pairs

SAMPLE = Path(__file__).parents[2] / "recipes" / "data" / "libreoffice_help_en_de"
LETTERS = "abcdefghij"


def page_in(part: str, number: int = 0) -> str:
    """The name of a page that falls into a part."""
    return [name for name in map("swriter/{}.html".format, range(2000)) if module._part_of(name) == part][number]


def chosen(*blocks: tuple[str, str, str]) -> dict[str, list[Pair]]:
    english = [Block(page, str(number), text) for number, (page, text, _) in enumerate(blocks)]
    german = [Block(page, str(number), text) for number, (page, _, text) in enumerate(blocks)]
    return choose_pairs(english, german)


def letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalpha()) or text


def assert_parts_are_apart(parts: dict[str, list[Pair]]) -> None:
    for number, part in enumerate(PARTS):
        earlier = [pair for other in PARTS[:number] for pair in parts[other]]
        assert {pair.page for pair in earlier}.isdisjoint(pair.page for pair in parts[part])
        for column in ("english", "german"):
            seen = {letters(getattr(pair, column)) for pair in earlier}
            assert not [pair for pair in parts[part] if letters(getattr(pair, column)) in seen]
        assert len({pair.english for pair in parts[part]}) == len(parts[part])


def test_what_training_pages_say_is_not_tested() -> None:
    train, dev, test = (page_in(part) for part in PARTS)
    parts = chosen(
        (train, "Press the left key.", "Links drücken."),
        (train, "Choose line 10 of it.", "Zeile 10 wählen."),
        (train, "Press the left key.", "Linke Taste drücken."),
        (dev, "press the LEFT key!", "Drücke die linke Taste."),  # the same sentence
        (dev, "Choose line 225 of it.", "Wähle Zeile 225."),  # the same but for a number
        (dev, "Use the key on the left.", "Links drücken!"),  # another one with the same translation
        (dev, "A sentence of its own.", "Ein eigener Satz."),
        (test, "A sentence of its own.", "Ein Satz für sich."),  # dev has it
        (test, "Nobody else says this.", "Das sagt sonst niemand."),
    )
    assert {(pair.english, pair.german) for pair in parts["train"]} == {
        ("Press the left key.", "Links drücken."),
        ("Choose line 10 of it.", "Zeile 10 wählen."),
    }
    assert parts["dev"] == [Pair(dev, "A sentence of its own.", "Ein eigener Satz.")]
    assert parts["test"] == [Pair(test, "Nobody else says this.", "Das sagt sonst niemand.")]
    assert_parts_are_apart(parts)


@pytest.mark.parametrize(
    ("english", "german", "kept"),
    [
        ("Press the left key.", "Links drücken.", True),
        ("This is not translated.", "This is not translated.", False),
        ("No full stop", "Kein Punkt.", False),
        ("Choose one of these:", "x" * 50, True),
        ("Choose one of these:", "x" * 51, False),
        ("Choose this and that one of these.", "x" * 13, False),
        ("Set A to 1.", "x" * 20, True),  # too short for the ratio to say anything
        ("Press it again. " * 12, "Wort " * 80, True),
        ("Press it again. " * 12, "Wort " * 81, False),
    ],
)
def test_only_what_can_be_a_translation_is_kept(english: str, german: str, kept: bool) -> None:
    assert bool(chosen((page_in("train"), english.strip(), german))["train"]) is kept


def test_blocks_without_a_translation_are_left_out() -> None:
    assert not choose_pairs([Block("p", "1", "Press the left key.")], [Block("p", "2", "Links drücken.")])["train"]


def help_folder(root: Path) -> Path:
    """An unpacked help of 200 pages, each with a sentence of its own and one that is on all."""
    for folder, words in (("en-US", "About the matter of {}."), ("de", "Über die Frage von {}.")):
        text_dir = root / "help" / folder / "text" / "swriter"
        text_dir.mkdir(parents=True)
        for page in range(200):
            name = "".join(LETTERS[int(digit)] for digit in f"{page:03}")
            text = f'<p id="own">{words.format(name)}</p><p id="all">{words.format("everything")}</p>'
            (text_dir / f"{page}.html").write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_PAIRS", {"train": 100, "dev": 3, "test": 3})


@pytest.mark.usefixtures("few_are_enough")
def test_building_counts_and_the_sample_is_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_PAIRS", {"train": 20, "dev": 2, "test": 1})
    source = help_folder(tmp_path / "source")
    folder = build_pairs(from_dir=source, cache=tmp_path / "cache")
    assert folder == tmp_path / "cache" / "libreoffice-help-en-de"
    parts = {part: list(read_pairs(folder / f"{part}.tsv")) for part in PARTS}
    counts = Manifest.read(folder).counts
    assert counts == {part: len(pairs) for part, pairs in parts.items()}
    assert sum(counts.values()) == 201  # the one that is on all pages is in train only
    assert_parts_are_apart(parts)
    sample = build_pairs(from_dir=source, output=tmp_path / "sample")
    assert Manifest.read(sample).counts == {"train": 20, "dev": 2, "test": 1}
    for part, count in Manifest.read(sample).counts.items():
        assert list(read_pairs(sample / f"{part}.tsv")) == parts[part][:count]
    again = build_pairs(from_dir=source, cache=tmp_path / "again")
    assert Manifest.read(again) == Manifest.read(folder)  # with the files' hashes


def test_too_few_pairs_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="at least 15,000 sentence pairs in train, found 1"):
        build_pairs(from_dir=help_folder(tmp_path / "source"), cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_shipped_sample_keeps_the_rules() -> None:
    parts = {part: list(read_pairs(SAMPLE / f"{part}.tsv")) for part in PARTS}
    assert {part: len(pairs) for part, pairs in parts.items()} == SAMPLE_PAIRS
    assert_parts_are_apart(parts)
    for part, pairs in parts.items():
        assert all(module._part_of(pair.page) == part for pair in pairs)
        assert all(is_sentence(pair.english) and pair.english != pair.german for pair in pairs)


def test_shipped_sample_has_its_licence_and_is_small() -> None:
    notice, manifest = (SAMPLE / "NOTICE").read_text(), Manifest.read(SAMPLE)
    assert manifest.version in notice
    assert "nebula data libreoffice-help-en-de --output recipes/data/libreoffice_help_en_de" in notice
    assert "Mozilla Public License Version 2.0" in (SAMPLE / "LICENSE-MPL-2.0").read_text()[:200]
    for part in PARTS:
        assert hashlib.sha256((SAMPLE / f"{part}.tsv").read_bytes()).hexdigest() == manifest.sha256[f"{part}.tsv"]
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 300_000


@pytest.mark.parametrize("content", ["", "page\tonly two\n", "page\tEnglish.\t\n"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.tsv"
    with pytest.raises(DataUnavailable, match=r"train\.tsv .*found none"):
        read_pairs(path)
    path.write_text(content)
    with pytest.raises(DataUnavailable, match=r"train\.tsv"):
        read_pairs(path)
