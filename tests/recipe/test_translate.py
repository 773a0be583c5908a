"""Recipe ``translate``: what is reported is what the saved model does, alone and with another cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.recipe import translation
from paddlenlp_nebula.recipe.translate import TranslateArguments, argument_classes, run

TINY: dict[str, Any] = {"pairs": "sample", "vocabulary": 500, "max_length": 32, "batch_tokens": 512}
TINY |= {"width": 16, "feed_forward": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_problems_are_collected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TranslateArguments(vocabulary=3, max_length=1, batch_tokens=0, width=0, dropout=1.0, eval_part="train")
    assert len(caught.value.problems) == 6
    with pytest.raises(ConfigurationError, match="a multiple of heads, got 100 with 3 heads"):
        TranslateArguments(width=100, heads=3)
    assert [cls.__name__ for cls in argument_classes()] == ["TrainingArguments", "TranslateArguments"]


def train(output_dir: Path, **fields: Any) -> dict[str, Any]:
    """Run the recipe alone, with a tiny model, and return its result."""
    from paddlenlp.trainer import TrainingArguments

    training = TrainingArguments(
        output_dir=str(output_dir),
        device="cpu",
        max_steps=4,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        learning_rate=1e-2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    nebula = NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback")
    run((training, TranslateArguments(**{**TINY, **fields})), nebula, alone=True)
    result: dict[str, Any] = json.loads((output_dir / "recipe_result.json").read_text())
    return result


def test_what_is_reported_is_what_the_saved_model_does(tmp_path: Path) -> None:
    import paddle
    from paddlenlp.transformers import T5ForConditionalGeneration, T5Tokenizer
    from sacrebleu import corpus_chrf

    from paddlenlp_nebula.distill.identity import tokenizer_fingerprint
    from paddlenlp_nebula.recipe.translation_data import Batches, Collator, load_corpus

    result = train(tmp_path / "out", eval_sentences=6, eval_part="test")
    model = T5ForConditionalGeneration.from_pretrained(result["saved"])
    tokenizer = T5Tokenizer.from_pretrained(result["saved"])
    assert tokenizer_fingerprint(tokenizer) == result["tokenizer"]
    assert len(tokenizer) == result["vocabulary"] == 500
    pairs = load_corpus("sample").parts["test"][:6]
    made = translation.translate(model, tokenizer, [pair.english for pair in pairs], max_length=32)
    lines = (tmp_path / "out" / "translations.tsv").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t") for line in lines] == [
        [pair.english, pair.german, text] for pair, text in zip(pairs, made, strict=True)
    ]
    assert result["chrf"] == pytest.approx(corpus_chrf(made, [[pair.german for pair in pairs]]).score)
    model.eval()
    losses = []
    dev = Batches(load_corpus("sample").parts["dev"], tokenizer, 32, 1)
    assert len(dev) == dev.rows > 20
    for index in range(len(dev)):
        batch = {name: paddle.to_tensor(array) for name, array in Collator(0)([dev[index]]).items()}
        labels = batch.pop("labels")
        with paddle.no_grad():
            losses.append(float(translation.TokenLoss()(model(**batch), labels)))
    assert result["eval_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert result["train_pairs"] + result["train_pairs_too_long"] == 800
    assert result["own_batches"] == -(-result["train_batches"] // 2)
    assert ["pairs", "sample"] in result["rows"]


def test_a_missing_package_is_found_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sacrebleu", "sacrebleu.metrics", "sacrebleu.metrics.bleu", "sacrebleu.metrics.chrf"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Exception, match=r"sacrebleu, .*pip install 'paddlenlp-nebula\[translation\]'"):
        train(tmp_path / "out")
    assert not (tmp_path / "out" / "nebula_report.json").exists()


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_two_clusters_end_with_one_model(tmp_path: Path) -> None:
    words = ["--local-clusters", "2", "--max_steps", "4", "--eval_sentences", "4", "--output_dir", str(tmp_path)]
    words += [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "paddlenlp_nebula.cli", "run", "train_translation", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    west, east = (
        {
            name: json.loads((tmp_path / cluster / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("nebula_report", "recipe_result")
        }
        for cluster in ("west", "east")
    )
    assert west["nebula_report"]["parameter_digest"] == east["nebula_report"]["parameter_digest"]
    assert west["nebula_report"]["rounds"] == 4
    assert not west["nebula_report"]["degradations"]
    for same in ("bleu", "chrf", "eval_loss", "tokenizer", "parameters"):
        assert west["recipe_result"][same] == east["recipe_result"][same]
    both = west["recipe_result"]["own_batches"] + east["recipe_result"]["own_batches"]
    assert both == west["recipe_result"]["train_batches"]
    assert Path(west["recipe_result"]["saved"]).is_dir()
