"""Recipe ``classify``, small: the model from scratch, a few steps, one cluster's part of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.data import minilm
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe import encoder
from paddlenlp_nebula.recipe.classify import ClassifyArguments, run
from paddlenlp_nebula.recipe.device import refuse_precision, use_device
from paddlenlp_nebula.recipe.encoder import make_vocabulary
from paddlenlp_nebula.recipe.sentences import find_data

SAMPLE = Path(__file__).parents[2] / "recipes" / "data" / "libreoffice_help_sections"


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """The head of the shipped sample."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in (("train", 120), ("dev", 24)):
        rows = (SAMPLE / f"{name}.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.tsv").write_text("".join(rows[:lines]), encoding="utf-8")
    return folder


def train(output_dir: Path, max_steps: int = 4, **fields: Any) -> dict[str, Any]:
    """Run the recipe alone and return its result."""
    from paddlenlp.trainer import TrainingArguments

    training = TrainingArguments(
        output_dir=str(output_dir),
        device="cpu",
        max_steps=max_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    nebula = NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback")
    run((training, ClassifyArguments(**fields)), nebula, alone=True)
    result: dict[str, Any] = json.loads((output_dir / "recipe_result.json").read_text())
    return result


def test_trains_evaluates_saves_and_reloads(tmp_path: Path, small_data: Path) -> None:
    result = train(tmp_path / "out", data_dir=str(small_data), model="scratch", eval_sentences=20)
    assert 0 <= result["accuracy"] <= 1
    assert 0 < result["majority"] < 0.5
    assert result["rows"][0] == ["accuracy", f"{result['accuracy']:.3f}"]
    assert result["parameters_trained"] == result["parameters"]  # nothing of it is pre-trained
    assert (tmp_path / "out" / "adapter" / "lora_model_state.pdparams").is_file()
    assert (tmp_path / "out" / "adapter" / "vocab.txt").is_file()
    report = json.loads((tmp_path / "out" / "nebula_report.json").read_text())
    assert (report["status"], report["steps"], report["max_steps"]) == ("done", 4, 4)
    assert [step for step, _ in report["losses"]] == [2, 4]
    assert report["train_loss"] == pytest.approx(sum(loss for _, loss in report["losses"]) / 2, abs=1e-4)
    assert "bytes_sent" not in report  # nothing was exchanged


def test_without_lora_the_whole_model_is_saved(tmp_path: Path, small_data: Path) -> None:
    result = train(tmp_path / "out", data_dir=str(small_data), model="scratch", lora=False)
    assert ["model, reloaded", "same predictions"] in result["rows"]
    assert ["training sentences", "60"] in result["rows"]
    assert not (tmp_path / "out" / "adapter").exists()


def test_missing_weights_are_said_loudly(tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise DataUnavailable("no client")

    monkeypatch.setattr(encoder, "build_minilm", fail)
    result = train(tmp_path / "out", data_dir=str(small_data))
    assert result["pretrained"] is False
    assert ["encoder", "FROM SCRATCH (no MiniLM-L6)"] in result["rows"]
    assert result["encoder"].endswith("because: no client")


@pytest.mark.skipif(minilm._installed_folder() is None, reason="the MiniLM-L6 package is not installed")
def test_minilm_adapter_holds_the_head_and_reloads(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paddle
    from paddlenlp.peft import LoRAModel
    from paddlenlp.transformers import BertForSequenceClassification

    monkeypatch.setenv("NEBULA_CACHE", str(tmp_path / "cache"))
    result = train(tmp_path / "out", max_steps=2, data_dir=str(small_data), max_length=16)
    assert result["pretrained"] is True
    assert result["parameters_trained"] < 0.005 * result["parameters"]
    state = paddle.load(str(tmp_path / "out" / "adapter" / "lora_model_state.pdparams"))
    assert {"classifier.weight", "classifier.bias"} < set(state)
    assert all("lora" in name or "classifier" in name for name in state)
    # As a user would, knowing nothing of the recipe.
    base = BertForSequenceClassification.from_pretrained(
        str(tmp_path / "cache" / "minilm-l6"), num_labels=len(result["labels"])
    )
    reloaded = LoRAModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    assert (reloaded.model.classifier.weight.numpy() == state["classifier.weight"].numpy()).all()


def test_an_adapter_that_does_not_reload_is_an_error(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddlenlp.peft.LoRAModel.save_pretrained", lambda self, folder: None)
    monkeypatch.setattr("paddlenlp.peft.LoRAModel.from_pretrained", lambda model, folder: model)
    with pytest.raises(NebulaError, match="logits that differ"):
        train(tmp_path / "out", data_dir=str(small_data), model="scratch")


def test_labels_that_were_never_trained_are_an_error(tmp_path: Path, small_data: Path) -> None:
    with (small_data / "dev.tsv").open("a") as file:
        file.write("Gardening\tpage\tWater the plants twice a day.\n")
    with pytest.raises(NebulaError, match="got also Gardening"):
        train(tmp_path / "out", data_dir=str(small_data), model="scratch")


def test_problems_are_collected() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ClassifyArguments(model="gpt", lora_rank=0, max_length=1000, eval_sentences=-1)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigurationError, match="libreoffice_help_sections"):
        find_data("nowhere")
    assert find_data("libreoffice_help_sections") == SAMPLE


def test_a_device_that_is_not_here_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="device must be one that Paddle can use here, got 'toaster'"):
        use_device("toaster")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bf16": True, "fp16_opt_level": "O2"}, "set bf16: false and fp16_opt_level: O1"),
        ({"fp16": True, "fp16_opt_level": "O2"}, "set fp16: false and fp16_opt_level: O1"),
        ({"bf16": True}, None),
        ({}, None),
    ],
)
def test_half_precision_without_kernels_is_one_sentence(
    tmp_path: Path, fields: dict[str, Any], said: str | None
) -> None:
    from paddlenlp.trainer import TrainingArguments

    training = TrainingArguments(output_dir=str(tmp_path), device="cpu", **fields)
    if said is None:
        refuse_precision(training)
    else:
        with pytest.raises(ConfigurationError, match=said):
            refuse_precision(training)


def test_the_vocabulary_depends_on_the_texts_alone() -> None:
    texts = ["Choose Insert - Chart.", "choose a chart"]
    vocabulary = make_vocabulary(texts, 40)
    assert vocabulary == make_vocabulary(list(reversed(texts)), 40)
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert vocabulary[-3:] == ["chart", "choose", "insert"]
    assert len(vocabulary) == len(set(vocabulary))
