"""The tokenizer of a text: the same on every site, and nothing is lost in it."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_nebula.data.pairs import read_pairs
from paddlenlp_nebula.data.subwords import build_subwords, load_subwords
from paddlenlp_nebula.distill.identity import tokenizer_fingerprint

SAMPLE = Path(__file__).parents[2] / "recipes" / "data" / "libreoffice_help_en_de"
TEXTS = [text for pair in read_pairs(SAMPLE / "train.tsv")[:300] for text in (pair.english, pair.german)]


def test_every_site_makes_the_same_one(tmp_path: Path) -> None:
    here, there = (build_subwords(TEXTS, 600, cache=tmp_path / site) for site in ("here", "there"))
    assert here.name == there.name
    first, second = load_subwords(here), load_subwords(there)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    assert (here / "spiece.model").read_bytes() == (there / "spiece.model").read_bytes()
    other = load_subwords(build_subwords(TEXTS[:-1], 600, cache=tmp_path / "here"))
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(first)
    assert len(list((tmp_path / "here" / "subwords").glob("600-*"))) == 2


def test_it_is_paddlenlps_t5_tokenizer_and_loses_nothing(tmp_path: Path) -> None:
    from paddlenlp.transformers import T5Tokenizer

    folder = build_subwords(TEXTS, 600, cache=tmp_path)
    tokenizer = T5Tokenizer.from_pretrained(str(folder))  # as a user loads it
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(load_subwords(folder))
    assert len(tokenizer) == 600
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


def test_a_small_text_gives_fewer_pieces(tmp_path: Path) -> None:
    assert len(load_subwords(build_subwords(TEXTS[:20], 8000, cache=tmp_path))) < 1000


def test_it_is_made_once(tmp_path: Path) -> None:
    folder = build_subwords(TEXTS[:40], 300, cache=tmp_path)
    (folder / "mark").touch()
    assert (build_subwords(TEXTS[:40], 300, cache=tmp_path) / "mark").exists()
    assert not (build_subwords(TEXTS[:40], 280, cache=tmp_path) / "mark").exists()
