"""Recipe ``pretrain``: no text is lost or read by two clusters, and what is reported is so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe import pretrain_data
from paddlenlp_nebula.recipe.pretrain import PretrainArguments, argument_classes, run
from paddlenlp_nebula.recipe.pretrain_data import (
    END,
    IGNORED,
    START,
    VOCABULARY,
    Blocks,
    Document,
    load_corpus,
    pack,
    split,
)
from paddlenlp_nebula.sharding import shard_dataset

TEXTS = st.lists(st.binary(max_size=40), max_size=8)


def documents(contents: list[bytes]) -> list[Document]:
    return [Document(f"page{number}", content) for number, content in enumerate(contents)]


def as_tokens(contents: list[bytes]) -> list[int]:
    """The reference: what `pack` must hold, token by token."""
    return [token for content in contents for token in (*content, END)]


@given(contents=TEXTS, length=st.integers(1, 17))
def test_blocks_are_the_text_in_its_order_and_nothing_else(contents: list[bytes], length: int) -> None:
    blocks = pack(documents(contents), length)
    assert blocks.shape == (math.ceil(len(as_tokens(contents)) / length), length)
    padding = blocks.size - len(as_tokens(contents))
    assert blocks.ravel().tolist() == as_tokens(contents) + [IGNORED] * padding
    assert padding < length


@given(contents=TEXTS, length=st.integers(2, 9), clusters=st.integers(2, 4), seed=st.integers(0, 99))
def test_each_token_is_learnt_by_exactly_one_cluster(
    contents: list[bytes], length: int, clusters: int, seed: int
) -> None:
    blocks = Blocks(pack(documents(contents), length))
    if len(blocks) < clusters:
        return
    rows = {}
    for index in range(clusters):
        part = shard_dataset(blocks, index, clusters, seed)
        for row, number in enumerate(part.indices.tolist()):
            assert number not in rows
            rows[number] = part[row]
    learnt = [label for number in sorted(rows) for label in rows[number]["labels"].tolist() if label != IGNORED]
    assert learnt == as_tokens(contents)
    for sample in rows.values():
        # What a cluster is shown are the tokens of its own block alone.
        seen, labels = sample["input_ids"], sample["labels"]
        assert seen[0] == START
        assert ((seen[1:] == labels[:-1]) | (labels[:-1] == IGNORED)).all()
        assert ((seen >= 0) & (seen < VOCABULARY)).all()


def test_evaluation_pages_are_not_trained_on() -> None:
    pages = documents([b"%d" % number for number in range(200)])
    train, held_out = split(pages, 3)
    assert len(held_out) == 6
    assert {page.name for page in train}.isdisjoint(page.name for page in held_out)
    assert sorted(train + held_out, key=pages.index) == pages
    assert train == sorted(train, key=pages.index)  # in reading order
    # Chosen by name: of a text with one page more, at most one other page is held out.
    _, more = split([*pages, Document("new", b"")], 3)
    assert len({page.name for page in more} - {page.name for page in held_out}) <= 2


def test_a_share_of_the_documents_never_is_all_or_none_of_them() -> None:
    pages = documents([b"a", b"b"])
    for percent in (0.01, 99.9):
        train, held_out = split(pages, percent)
        assert (len(train), len(held_out)) == (1, 1)
    with pytest.raises(NebulaError, match="at least two documents, one of them to evaluate on, got 1"):
        split(pages[:1], 3)


def test_a_folder_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xff no UTF-8, and still text")
    (tmp_path / "sub" / "a.txt").write_text("größer")
    (tmp_path / "c.md").write_text("not taken")
    corpus = load_corpus(str(tmp_path))
    assert [page.name for page in corpus.documents] == ["b.txt", "sub/a.txt"]
    assert corpus.documents[1].content.decode() == "größer"
    assert corpus.title == f"{tmp_path.name}, 2 files"


def test_the_help_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocks_en-us.tsv").write_text("p1\ta\tOne.\np1\tb\tTwo.\np2\ta\tThree.\n")
    manifest = {"name": "x", "package": "x", "version": "7.4", "licence": "x", "counts": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(pretrain_data, "build_help", lambda languages: tmp_path)
    corpus = load_corpus("libreoffice-help")
    assert corpus.documents == [Document("p1", b"One.\nTwo."), Document("p2", b"Three.")]
    assert (corpus.title, corpus.version, corpus.lacking) == ("LibreOffice help", "7.4", "")


def without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(languages: list[str]) -> Path:
        raise DataUnavailable("no client")

    monkeypatch.setattr(pretrain_data, "build_help", fail)


def test_the_sample_takes_the_place_of_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    without_help(monkeypatch)
    corpus = load_corpus("libreoffice-help")
    assert corpus.lacking == "no client"
    assert corpus.title == "ONLY A SAMPLE"
    assert corpus.documents == load_corpus("sample").documents
    assert sum(page.content.count(b"\n") + 1 for page in corpus.documents) == 3162 + 504
    assert not load_corpus("sample").lacking


def test_problems_are_collected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PretrainArguments(num_hidden_layers=0, hidden_size=1, max_seq_length=4, eval_blocks=-1, eval_percent=100)
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigurationError, match=r"a multiple of 2 x num_attention_heads, .* 128 with 3"):
        PretrainArguments(hidden_size=128, num_attention_heads=3)
    with pytest.raises(ConfigurationError, match=r"'sample' or a folder with \.txt files, got 'nowhere'"):
        load_corpus("nowhere")
    assert [cls.__name__ for cls in argument_classes()] == ["TrainingArguments", "PretrainArguments"]


def train(output_dir: Path, **fields: Any) -> dict[str, Any]:
    """Run the recipe alone, with a tiny model, and return its result."""
    from paddlenlp.trainer import TrainingArguments

    training = TrainingArguments(
        output_dir=str(output_dir),
        device="cpu",
        max_steps=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    nebula = NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback")
    tiny: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_seq_length": 32}
    run((training, PretrainArguments(**{**tiny, "eval_blocks": 20, **fields})), nebula, alone=True)
    result: dict[str, Any] = json.loads((output_dir / "recipe_result.json").read_text())
    return result


def test_what_is_reported_is_what_the_saved_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paddle
    from paddlenlp.transformers import LlamaForCausalLM

    without_help(monkeypatch)
    result = train(tmp_path / "out")
    pages = load_corpus("sample").documents
    _, held_out = split(pages, 3)
    tokens = pack(held_out, 32)[:20]
    model = LlamaForCausalLM.from_pretrained(result["saved"])
    model.eval()
    with paddle.no_grad():
        inputs = np.concatenate([np.full((20, 1), START), tokens[:, :-1]], axis=1).astype(np.int64)
        logits = model(paddle.to_tensor(inputs))
    logits = (logits[0] if isinstance(logits, tuple) else logits).numpy().astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(axis=-1)) + largest[..., 0]
    nats = log_sum - np.take_along_axis(logits, tokens[..., None].astype(np.int64), axis=-1)[..., 0]
    assert result["eval_loss"] == pytest.approx(nats.mean(), abs=1e-4)
    assert result["eval_loss"] < math.log(VOCABULARY)  # better than a guess, after four steps
    assert result["bits_per_byte"] == pytest.approx(nats.mean() / math.log(2), abs=1e-4)
    assert ["text", "ONLY A SAMPLE"] in result["rows"]
    assert result["text_lacking"] == "no client"
    assert result["own_blocks"] == math.ceil(result["train_blocks"] / 2)
    report = json.loads((tmp_path / "out" / "nebula_report.json").read_text())
    assert (report["status"], report["steps"]) == ("done", 4)


def test_too_little_to_evaluate_on_is_one_sentence(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("short")
    with pytest.raises(
        NebulaError, match="at least one block of 32 bytes in the 1 documents held out of texts, 4 files"
    ):
        train(tmp_path / "out", text=str(texts))
