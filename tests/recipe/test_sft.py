"""Recipe ``sft``: a PaddleNLP user's own flat JSON file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe.sft_data import encode, load_pairs

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "plus", "is", "and", "what")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


class TinyTokenizer:
    """Splits at spaces; enough of a tokenizer for ``encode``."""

    eos_token_id = 2

    def __call__(
        self, text: str, max_length: int, truncation: bool, truncation_side: str, add_special_tokens: bool
    ) -> dict[str, list[int]]:
        ids = [len(SPECIAL) + WORDS.index(word) for word in text.split()]
        kept = max_length - add_special_tokens
        ids = ids[-kept:] if truncation_side == "left" else ids[:kept]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_labels_are_shifted_and_the_source_is_not_learnt() -> None:
    encoded = encode(("one plus two", "three"), TinyTokenizer(), 8, 16)
    #                               <s> one plus two  three </s>
    assert encoded["input_ids"] == [1, 4, 12, 5, 6]
    assert encoded["labels"] == [-100, -100, -100, 6, 2]


def test_a_long_source_loses_its_beginning_and_a_long_target_its_end() -> None:
    encoded = encode(("one two three four", "five six seven eight"), TinyTokenizer(), 3, 5)
    assert encoded["input_ids"] == [1, 6, 7, 8]
    assert encoded["labels"] == [-100, -100, 8, 9]


@pytest.mark.parametrize("line", ["not json", '{"src": "one"}', '{"src": ["a", "b"], "tgt": "c"}', "[1]"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"src": "one", "tgt": ["two"]}) + "\n" + line + "\n")
    with pytest.raises(NebulaError, match=r"train\.json:2"):
        load_pairs(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, its tokenizer, and data."""
    import sentencepiece
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    lines = [f"what is {a} plus {b} and {c}" for a in WORDS[:8] for b in WORDS[:8] for c in WORDS[:4]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "pieces"),
        vocab_size=64,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = LlamaTokenizer(str(folder / "pieces.model"))
    tokenizer.save_pretrained(str(folder / "model"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder / "model"), safe_serialization=True)
    (folder / "data").mkdir()
    for name, part in (("train", lines[:32]), ("dev", lines[32:40])):
        rows = [json.dumps({"src": line, "tgt": line.split()[2]}) for line in part]
        (folder / "data" / f"{name}.json").write_text("\n".join(rows) + "\n")
    return folder


def parse(settings: dict[str, Any], folder: Path) -> Sequence[Any]:
    """Parse a user's file as PaddleNLP's own script would."""
    from paddlenlp.trainer import PdArgumentParser

    from paddlenlp_nebula.recipe.sft import argument_classes

    path = folder / "lora_argument.json"
    path.write_text(json.dumps(settings))
    parsed: Sequence[Any] = PdArgumentParser(argument_classes()).parse_json_file(str(path))
    return parsed


def settings(tiny: Path, output_dir: Path, **more: Any) -> dict[str, Any]:
    """The keys of PaddleNLP's sample file, sized for a test."""
    return {
        "model_name_or_path": str(tiny / "model"),
        "dataset_name_or_path": str(tiny / "data"),
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 4,
        "eval_accumulation_steps": 16,
        "max_steps": 4,
        "learning_rate": 3e-03,
        "warmup_steps": 1,
        "logging_steps": 1,
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "src_length": 24,
        "max_length": 32,
        "do_train": True,
        "do_eval": True,
        "disable_tqdm": True,
        "eval_with_do_generation": False,
        "recompute": True,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "sharding": "stage1",
        "zero_padding": False,
        "unified_checkpoint": True,
        "device": "cpu",
        "report_to": "none",
        **more,
    }


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ({"lora": True, "lora_rank": 4, "pissa": False}, "peft_model.safetensors.index.json"),
        ({"lora": True, "unified_checkpoint": False}, "lora_model_state.pdparams"),
        ({"prefix_tuning": True, "num_prefix_tokens": 3, "unified_checkpoint": False}, "prefix_model_state.pdparams"),
        ({"vera": True, "unified_checkpoint": False}, "vera_model_state.pdparams"),
        ({"lokr": True, "unified_checkpoint": False}, "lokr_model_state.pdparams"),
        ({}, "model.safetensors.index.json"),
    ],
    ids=["lora-unified", "lora", "prefix", "vera", "lokr", "all"],
)
def test_a_users_file_trains_and_saves(tiny: Path, tmp_path: Path, flags: dict[str, Any], saved: str) -> None:
    from paddlenlp_nebula.arguments import NebulaArguments
    from paddlenlp_nebula.recipe.sft import run

    output_dir = tmp_path / "out"
    arguments = parse(settings(tiny, output_dir, **flags), tmp_path)
    run(tuple(arguments), NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback"), alone=True)
    assert (output_dir / saved).is_file()
    result = json.loads((output_dir / "recipe_result.json").read_text())
    assert 0 < result["train_loss"] < 10
    assert 0 < result["eval_loss"] < 10


def test_a_run_that_resumes_says_so(tiny: Path, tmp_path: Path) -> None:
    from paddlenlp_nebula.arguments import NebulaArguments
    from paddlenlp_nebula.recipe.sft import run

    more = {"lora": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 2, "do_eval": False}
    rows = []
    for again in ({}, {}, {"overwrite_output_dir": True}):
        arguments = parse(settings(tiny, tmp_path / "out", **more, **again), tmp_path)
        run(tuple(arguments), NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback"), alone=True)
        rows.append(json.loads((tmp_path / "out" / "recipe_result.json").read_text())["rows"])
    assert rows == [[], [["resumed from", "checkpoint-2"]], []]


def test_what_cannot_be_honoured_is_refused_all_at_once(tiny: Path) -> None:
    from paddlenlp_nebula.recipe.sft_arguments import SftDataConfig, SftModelConfig, SftTrainingArguments

    with pytest.raises(ConfigurationError) as caught:
        SftModelConfig(
            model_name_or_path="x", reft=True, neftune=True, weight_quantize_algo="nf4", lora=True, vera=True
        )
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigurationError) as caught:
        SftDataConfig(dataset_name_or_path="nowhere", zero_padding=True, src_length=64, max_length=32)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigurationError, match="max_seq_length"):
        SftTrainingArguments(output_dir="unused", max_seq_length=128)
    with pytest.raises(ConfigurationError, match="chat_template"):
        SftDataConfig(dataset_name_or_path=str(tiny / "data"), chat_template="some/file.json")


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_two_clusters_train_from_one_users_file(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "lora_argument.json"
    path.write_text(json.dumps(settings(tiny, tmp_path / "out", lora=True, sync_codec="bf16")))
    start = "from paddlenlp_nebula.cli.main import main; main()"
    command = [sys.executable, "-c", start, "run", str(path), "--local-clusters", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [
        json.loads((tmp_path / "out" / name / "nebula_report.json").read_text(encoding="utf-8"))
        for name in ("west", "east")
    ]
    assert reports[0]["parameter_digest"] == reports[1]["parameter_digest"]
    assert [report["rounds"] for report in reports] == [4, 4]
    assert (tmp_path / "out" / "west" / "peft_model.safetensors.index.json").is_file()
