"""What translates: batches hold each pair once, the loss is per token, greedy is greedy, and scores are sacreBLEU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.pairs import PARTS, SAMPLE_PAIRS, Pair
from paddlenlp_nebula.data.subwords import build_subwords, load_subwords
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe import translation_data
from paddlenlp_nebula.recipe.translation import Sizes, TokenLoss, make_model, score, translate
from paddlenlp_nebula.recipe.translation_data import Batches, Collator, encode, load_corpus

TINY = Sizes(width=16, feed_forward=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.1)


class Letters:
    """A tokenizer of which each letter is a token."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text] + [1]}


WORDS = st.text("abc", min_size=1, max_size=12)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=30), st.integers(3, 13), st.integers(1, 60))
def test_each_pair_that_fits_is_in_one_batch(texts: list[tuple[str, str]], max_length: int, batch_tokens: int) -> None:
    pairs = [Pair("page", *both) for both in texts]
    batches = Batches(pairs, Letters(), max_length, batch_tokens)
    fit = [pair for pair in pairs if max(len(pair.english), len(pair.german)) < max_length]
    expected = sorted((encode(Letters(), pair.english), encode(Letters(), pair.german)) for pair in fit)
    assert sorted(row for index in range(len(batches)) for row in batches[index]) == expected
    assert (batches.rows, batches.left_out) == (len(fit), len(pairs) - len(fit))
    for index in range(len(batches)):
        made = Collator(0)([batches[index]])
        assert made["input_ids"].size + made["labels"].size <= batch_tokens or len(batches[index]) == 1


def test_what_the_model_is_given() -> None:
    made = Collator(0)([[([5, 6, 1], [7, 1])], [([8, 1], [9, 10, 1])]])
    assert {name: array.tolist() for name, array in made.items()} == {
        "input_ids": [[5, 6, 1], [8, 1, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "decoder_input_ids": [[0, 7, 0], [0, 9, 10]],  # what is to be predicted, one later
        "labels": [[7, 1, -100], [9, 10, 1]],
    }
    assert {array.dtype.name for array in made.values()} == {"int64"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = load_corpus("sample").texts[:200]
    return load_subwords(build_subwords(texts, 400, cache=tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    paddle.seed(7)
    made = make_model(TINY, tokenizer)
    made.eval()
    return made


def test_the_loss_is_the_mean_over_tokens_however_much_is_padded(model: Any) -> None:
    short, long = ([5, 6, 1], [7, 1]), ([8, 9, 10, 11, 1], [12, 13, 14, 15, 16, 1])
    losses = []
    for rows in ([short], [long], [short, long]):
        batch = {name: paddle.to_tensor(array) for name, array in Collator(0)([rows]).items()}
        labels = batch.pop("labels")
        with paddle.no_grad():
            outputs = model(**batch)
        logits = outputs[0].numpy().astype(np.float64)
        wanted = labels.numpy()
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        reference = -np.mean([logs[place][wanted[place]] for place in zip(*np.nonzero(wanted != -100), strict=True)])
        losses.append(float(TokenLoss()(outputs, labels)))
        assert losses[-1] == pytest.approx(reference, abs=1e-5)
    assert losses[2] == pytest.approx((2 * losses[0] + 6 * losses[1]) / 8, abs=1e-5)


def greedy(model: Any, tokenizer: Any, sentence: str, max_length: int) -> str:
    """The reference: a sentence by itself, the whole prefix anew for every token, no cache."""
    source = paddle.to_tensor([encode(tokenizer, sentence)[:max_length]])
    prefix = [0]
    for _ in range(max_length):
        with paddle.no_grad():
            logits = model(input_ids=source, decoder_input_ids=paddle.to_tensor([prefix]))[0]
        prefix.append(int(logits[0, -1].argmax()))
        if prefix[-1] == tokenizer.eos_token_id:
            break
    decoded: str = tokenizer.decode(prefix[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return decoded


def test_translations_are_greedy_in_order_and_do_not_depend_on_the_batch(model: Any, tokenizer: Any) -> None:
    sentences = [pair.english for pair in load_corpus("sample").parts["dev"][:7]]
    made = translate(model, tokenizer, sentences, max_length=10, batch_size=3)
    assert made == [greedy(model, tokenizer, sentence, 10) for sentence in sentences]
    assert len(set(made)) > 1  # else the order would not be tested


def test_what_was_learnt_is_translated(tokenizer: Any) -> None:
    """A T5 that learns two pairs by heart says them, with the blank that English would not have, and stops."""
    paddle.seed(1)
    pairs = [Pair("p", "Click the left button.", "Links klicken ."), Pair("p", "Save the document.", "Speichern.")]
    model = make_model(Sizes(32, 64, 2, 1, 1, 0.0), tokenizer)
    batch = {name: paddle.to_tensor(array) for name, array in Collator(0)(Batches(pairs, tokenizer, 40, 200)).items()}
    labels = batch.pop("labels")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    for _ in range(160):
        loss = TokenLoss()(model(**batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    assert translate(model, tokenizer, [pair.english for pair in pairs], max_length=40) == [
        pair.german for pair in pairs
    ]


def test_scores_are_sacrebleus() -> None:
    from sacrebleu import corpus_bleu, corpus_chrf

    pairs = load_corpus("sample").parts["dev"][:20]
    references = [pair.german for pair in pairs]
    made = [" ".join(reference.split()[:-1]) for reference in references]
    scores = score(made, references)
    assert scores["bleu"] == pytest.approx(corpus_bleu(made, [references]).score)
    assert scores["chrf"] == pytest.approx(corpus_chrf(made, [references]).score)
    assert scores["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert scores["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")
    assert 0 < scores["bleu"] < scores["chrf"] < 100
    with pytest.raises(NebulaError, match="got 1 and 2"):
        score(["a"], ["a", "b"])


def test_the_pairs_that_a_recipe_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = load_corpus("sample")
    assert {part: len(pairs) for part, pairs in sample.parts.items()} == SAMPLE_PAIRS
    assert sample.version
    assert sample.title == "sample"
    assert sample.texts[:2] == list(sample.parts["train"][0][1:])
    for part in PARTS:
        (tmp_path / f"{part}.tsv").write_text("page\tA sentence.\tEin Satz.\n")
    own = load_corpus(str(tmp_path))
    assert (own.title, own.version, own.texts) == (tmp_path.name, "", ["A sentence.", "Ein Satz."])
    with pytest.raises(ConfigurationError, match=r"train\.tsv, dev\.tsv and test\.tsv, got 'nowhere'"):
        load_corpus("nowhere")

    monkeypatch.setattr(translation_data, "build_pairs", lambda: tmp_path)
    assert load_corpus("libreoffice-help").title == "LibreOffice help"

    def fail() -> Path:
        raise DataUnavailable("no client")

    monkeypatch.setattr(translation_data, "build_pairs", fail)
    instead = load_corpus("libreoffice-help")
    assert (instead.title, instead.lacking, instead.parts) == ("ONLY A SAMPLE", "no client", sample.parts)
