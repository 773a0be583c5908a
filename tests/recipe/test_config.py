"""Recipe configuration: one table of what goes wrong, and everything of it reported at once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.recipe.config import convert, load_configuration
from paddlenlp_nebula.recipe.registry import RECIPES, Recipe
from paddlenlp_nebula.recipe.source import find_recipe, read_overrides, read_recipe, shipped_recipes

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEBULA_CLUSTER", "NEBULA_CLUSTERS", "NEBULA_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def classes() -> tuple[type, ...]:
    from paddlenlp.trl import DataConfig, ModelConfig, SFTConfig

    return ModelConfig, DataConfig, SFTConfig


def settings_of(tmp_path: Path, text: str, overrides: list[str], name: str = "job.yaml") -> Any:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_recipe(path).overridden_by(read_overrides(overrides))


def converted(tmp_path: Path, classes: tuple[type, ...], text: str, *overrides: str, name: str = "job.yaml") -> Any:
    """All fields of all instances, by attribute."""
    source = settings_of(tmp_path, "output_dir: out\ndevice: cpu\n", [])
    source = source.overridden_by(settings_of(tmp_path, text or "{}", list(overrides), name))
    namespace: dict[str, Any] = {}
    for instance in convert(classes, source):
        namespace |= vars(instance)
    return namespace


def problems_of(tmp_path: Path, classes: tuple[type, ...], text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        convert(classes, settings_of(tmp_path, text or "{}", list(overrides)))
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "overrides", "key", "value"),
    [
        ("max_steps: 7", (), "max_steps", 7),
        ("max_steps: 7", ("--max_steps", "9"), "max_steps", 9),
        ("max_steps: 7", ("--max_steps=9",), "max_steps", 9),
        ("", ("--max_steps", "1", "--max_steps", "2"), "max_steps", 2),
        ("max_steps: -1", (), "max_steps", -1),
        ("tensor_parallel_degree: 1", (), "tensor_parallel_degree", -1),  # a single process: PaddleNLP's own doing
        ("sharding: stage1", (), "sharding", []),
        ("", ("--max_steps", "-1"), "max_steps", -1),
        ("learning_rate: 1e-4", (), "learning_rate", 1e-4),
        ("learning_rate: 3", (), "learning_rate", 3.0),
        ("lora: true", (), "lora", True),
        ("lora: True", ("--no_lora",), "lora", False),
        ("lora: true", ("--lora", "false"), "lora", False),
        ("lora: off\n".replace("off", "no"), (), "lora", False),
        ("", ("--lora",), "lora", True),
        ("", ("--lora", "--max_steps", "3"), "lora", True),
        ("", ("--no_skip_memory_metrics",), "skip_memory_metrics", False),
        ("", ("--no_cuda",), "no_cuda", True),
        ("disable_tqdm: true", (), "disable_tqdm", True),
        ("save_total_limit: null", (), "save_total_limit", None),
        ("save_total_limit: ~", (), "save_total_limit", None),
        ("save_total_limit:", (), "save_total_limit", None),
        ("save_total_limit: 3", ("--save_total_limit", "null"), "save_total_limit", None),
        ("lora_path: 'null'", (), "lora_path", "null"),
        ("task_name: 1.10", (), "task_name", "1.10"),
        ("task_name: -dash", (), "task_name", "-dash"),
        ("report_to: none", (), "report_to", []),
        ("report_to: [visualdl, tensorboard]", (), "report_to", ["visualdl", "tensorboard"]),
        ("", ("--report_to", "visualdl", "tensorboard"), "report_to", ["visualdl", "tensorboard"]),
        ("skip_data_intervals: [[1, 2], [5, 6]]", (), "skip_data_intervals", [[1, 2], [5, 6]]),
    ],
)
def test_values(
    tmp_path: Path, classes: tuple[type, ...], text: str, overrides: tuple[str, ...], key: str, value: Any
) -> None:
    assert converted(tmp_path, classes, text, *overrides)[key] == value


def test_a_choice_called_no_is_not_a_boolean(tmp_path: Path, classes: tuple[type, ...]) -> None:
    values = converted(tmp_path, classes, "evaluation_strategy: no\nlr_scheduler_type: cosine\nsave_strategy: epoch")
    assert [values[k].value for k in ("evaluation_strategy", "lr_scheduler_type", "save_strategy")] == [
        *("no", "cosine", "epoch"),
    ]


def test_json_means_the_same(tmp_path: Path, classes: tuple[type, ...]) -> None:
    content = {"lora": True, "learning_rate": 3e-05, "max_steps": -1, "lora_path": None, "report_to": ["visualdl"]}
    values = converted(tmp_path, classes, json.dumps(content), name="lora_argument.json")
    assert {key: values[key] for key in content} == content


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("max_stps: 3", (), "max_stps is not a key of this recipe (line 1 of job.yaml): did you mean max_steps?"),
        ("", ("--max-steps", "3"), "max-steps is not a key of this recipe (command line): did you mean max_steps?"),
        ("", ("--no-lora",), "did you mean lora?"),
        ("", ("--max_step", "3"), "max_step is not a key"),
        ("qqqqqq: 1", (), "qqqqqq is not a key of this recipe (line 1 of job.yaml): remove it"),
        ("max_steps: ten", (), "max_steps must be a whole number, got 'ten' (line 1 of job.yaml)"),
        ("max_steps: 1.5", (), "max_steps must be a whole number, got '1.5'"),
        ("max_steps: true", (), "max_steps must be a whole number, got 'true'"),
        ("max_steps: [1, 2]", (), "max_steps must be a whole number, got ['1', '2']"),
        ("", ("--max_steps",), "max_steps must be a whole number, got nothing (command line)"),
        ("", ("--max_steps", "1", "2"), "max_steps must be a whole number, got ['1', '2'] (command line)"),
        ("max_steps: 0", (), "max_steps must be at least 1, or -1 for 'not set', got '0'"),
        ("learning_rate: fast", (), "learning_rate must be a finite number, got 'fast'"),
        ("learning_rate: nan", (), "learning_rate must be a finite number, got 'nan'"),
        ("learning_rate: -1", (), "learning_rate must be 0 or more, got '-1'"),
        ("warmup_ratio: 2", (), "warmup_ratio must be between 0 and 1, got '2'"),
        ("lora: maybe", (), "lora must be true or false, got 'maybe'"),
        (
            "tensor_parallel_degree: 2",
            (),
            "tensor_parallel_degree must be 1 (tensor parallelism inside a cluster is not",
        ),
        ("pipeline_parallel_degree: 4", (), "pipeline_parallel_degree must be 1 (pipeline parallelism"),
        ("", ("--sep_parallel_degree", "2"), "across clusters yet), got '2' (command line)"),
        ("context_parallel_degree: 2", (), "context_parallel_degree must be 1 (context parallelism"),
        ("use_expert_parallel: true", (), "use_expert_parallel must be false (expert parallelism"),
        ("sharding: stage2", (), "sharding must be stage1 or not set (any other inside a cluster is not supported"),
        ("sharding: stage1 offload", (), "sharding must be stage1 or not set (any other"),
        ("evaluation_strategy: rarely", (), "evaluation_strategy must be 'no' or 'steps' or 'epoch', got 'rarely'"),
        ("lr_scheduler_type: lin", (), "lr_scheduler_type must be 'linear' or 'cosine' or"),
        ("report_to: []", (), "report_to must be a list of words, got nothing"),
        ("report_to: [a, {b: c}]", (), "report_to must be a list of plain values"),
        ("skip_data_intervals: [[1, two]]", (), "skip_data_intervals must be a list of lists"),
        ("model: {name: x, size: 3}", (), "write its keys (name, size) beside model"),
        ("lora: true\nlora: false", (), "lora is set twice, in line 1 of job.yaml and in line 2 of job.yaml"),
        ("", ("max_steps", "3"), "overrides are written --key value, got 'max_steps'"),
        ("output_dir: null", (), "output_dir must be set, got nothing"),
        ("fp16: true\nbf16: true", (), "SFTConfig refuses these values: At most one of fp16 and bf16 can be True"),
    ],
)
def test_problems(
    tmp_path: Path, classes: tuple[type, ...], text: str, overrides: tuple[str, ...], problem: str
) -> None:
    assert any(problem in found for found in problems_of(tmp_path, classes, text, *overrides))


def test_all_problems_come_together(tmp_path: Path, classes: tuple[type, ...]) -> None:
    text = """
        max_stps: 3
        learning_rate: fast
        gradient_accumulation_steps: 0
        evaluation_strategy: rarely
        lora: true
        lora: false
        model: {a: 1}
        fp16: true
        bf16: true
        sync_codec: fp17
        sync_quorum: 9
        cluster: west
        clusters: west,east
        rendezvous: nowhere
    """
    text = "\n".join(line.strip() for line in text.splitlines())
    found = problems_of(tmp_path, (*classes, NebulaArguments), text, "stray", "--seed", "1.5", "--no_such")
    everything = "\n".join(found)
    for word in (
        *("max_stps", "learning_rate", "gradient_accumulation_steps", "evaluation_strategy", "lora is set twice"),
        *("model must", "fp16 and bf16", "sync_codec", "sync_quorum", "rendezvous", "stray", "seed", "no_such"),
        "output_dir must be set",
    ):
        assert everything.count(word) >= 1, f"{word} in:\n{everything}"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "", "must be a mapping of keys to values, got nothing"),
        ("a.yaml", "- x", "must be a mapping of keys to values, got a list"),
        ("a.yaml", "a: [", "a.yaml is not valid YAML: line 1, column 5: "),
        ("a.yaml", 'a: "x\nb: 3\n', "line 3, column 1: found unexpected end of stream (while scanning"),
        ("a.yaml", "a: 1\n b: 2\n", "is not valid YAML: line 2, column 3: mapping values are not allowed here"),
        ("a.json", "[1]", "must be a mapping of keys to values, got a list"),
        ("a.json", "{", "is not valid JSON"),
        (
            "a.yaml",
            "recipe: clasify",
            "recipe must be 'classify' or 'distill' or 'pretrain' or 'sft' or 'translate', got 'clasify' (line 1 of a.yaml)",
        ),
        (
            "a.yaml",
            "recipe: [classify]",
            "recipe must be 'classify' or 'distill' or 'pretrain' or 'sft' or 'translate', got ['classify'] (line 1 of a.yaml)",
        ),
        ("a.yaml", "recipe: clasify\n? [a, b]\n: 1", "keys are plain words, got ['a', 'b'] in line 2 of a.yaml"),
        ("a.yaml", "max_steps: 5\0", "is not valid YAML: unacceptable character #x0000"),
        ("a.yaml", "[" * 5000, "a.yaml must be flat, got values nested without end"),
        ("a.json", '{"a":' + "[" * 200000, "a.json must be flat, got values nested without end"),
        (
            "a.json",
            '\ufeff{"recipe": "clasify"}',
            "recipe must be 'classify' or 'distill' or 'pretrain' or 'sft' or 'translate', got 'clasify' (in a.json)",
        ),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match="problem") as caught:
        load_configuration(str(tmp_path / name))
    assert said in str(caught.value)


def test_json_that_sets_a_key_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"lora": true, "lora": false}')
    assert read_recipe(tmp_path / "a.json").problems == ["lora is set twice in a.json: remove one of the two"]


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no recipe file .xxx.*File name too long"):
        load_configuration("x" * 5000)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no recipe file"):
        find_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigurationError, match="got the directory"):
        find_recipe(str(tmp_path))


def test_a_file_without_the_key_recipe_is_a_paddlenlp_users_own(tmp_path: Path) -> None:
    (tmp_path / "lora_argument.json").write_text(json.dumps({"learning_rat": 1, "sync_codec": "fp17"}))
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(str(tmp_path / "lora_argument.json"), any_site=True)
    assert "did you mean learning_rate?" in str(caught.value)
    assert "sync_codec must be" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("device: toaster", "device must be one that Paddle can use here, got 'toaster'"),
        ("bf16: true\nfp16_opt_level: O2", "bf16 with fp16_opt_level O2 needs a GPU, got device 'cpu'"),
    ],
)
def test_what_this_machine_cannot_do_is_found_before_anything_starts(tmp_path: Path, line: str, said: str) -> None:
    fields = {"recipe": "classify", "output_dir": "out", "device": "cpu"}
    fields |= dict(pair.split(": ") for pair in line.split("\n"))
    (tmp_path / "job.yaml").write_text("\n".join(f"{key}: {value}" for key, value in fields.items()))
    with pytest.raises(ConfigurationError, match=said):
        load_configuration(str(tmp_path / "job.yaml"), any_site=True)


def test_what_this_machine_cannot_do_is_said_beside_the_rest(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("recipe: classify\noutput_dir: out\ndevice: toaster\nmodel: x\nsync_codec: y\n")
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(str(tmp_path / "job.yaml"), any_site=True)
    assert [problem.split()[0] for problem in caught.value.problems] == ["device", "model", "sync_codec"]


def test_the_worker_refuses_before_training(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("recipe: classify\nmax_stps: 1\n")
    worker = [sys.executable, "-m", "paddlenlp_nebula.recipe.worker", str(tmp_path / "job.yaml"), "--seed", "x"]
    done = subprocess.run(worker, capture_output=True, text=True)
    assert done.returncode == 2
    for word in ("max_stps", "seed", "output_dir", "rendezvous"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


SHIPPED = shipped_recipes()


def test_the_shipped_recipes_are_found() -> None:
    assert sorted(SHIPPED) == [
        "distill_encoder",
        "finetune_lora",
        "finetune_lora_sparse",
        "pretrain_local_steps",
        "train_translation",
    ]
    assert find_recipe("finetune_lora") == SHIPPED["finetune_lora"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_validates(name: str) -> None:
    configuration = load_configuration(name, any_site=True)
    assert configuration.recipe.name in RECIPES
    assert configuration.value("output_dir")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_explains_every_key(name: str) -> None:
    lines = SHIPPED[name].read_text(encoding="utf-8").splitlines()
    keys = [line for line in lines if line and not line.startswith("#")]
    assert len(keys) > 20
    assert [line for line in keys if " # " not in line] == []


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_field_of_our_own_is_explained(recipe: Recipe) -> None:
    for cls in recipe.argument_classes():
        if cls.__module__.startswith("paddlenlp_nebula"):
            for field in fields(cls):
                if field.name in cls.__annotations__ and field.init:  # a key, and not inherited
                    assert len(field.metadata["help"]) > 20, field.name
