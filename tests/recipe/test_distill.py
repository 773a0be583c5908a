"""Recipe ``distill``: small, teacher and student by `nebula run`, and everything that is refused before that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.recipe.config import load_configuration

pytestmark = pytest.mark.timeout(120)

TINY = {
    "teacher": "scratch",
    "teacher_steps": 4,
    "max_steps": 6,
    "student_layers": 1,
    "student_width": 16,
    "max_length": 16,
    "eval_sentences": 32,
    "per_device_train_batch_size": 4,
    "distill_timeout_s": 60,
}
SITE = ["--clusters", "west,east", "--rendezvous", "127.0.0.1:1", "--sync_security", "none"]


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLUSTER", "CLUSTERS", "RENDEZVOUS"):
        monkeypatch.delenv(f"NEBULA_{name}", raising=False)


def words(output_dir: Path, **changes: Any) -> list[str]:
    settings = {**TINY, "output_dir": output_dir, **changes}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def nebula(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paddlenlp_nebula.cli", "run", "distill_encoder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_teacher_and_its_student_and_the_student_alone(tmp_path: Path) -> None:
    from paddlenlp.transformers import BertForSequenceClassification

    done = nebula("--local-clusters", "2", *words(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    teacher, student, alone = (read(tmp_path / name / "recipe_result.json") for name in ("west", "east", "alone"))
    assert [dict(result["rows"])["role"] for result in (teacher, student, alone)] == [
        "teacher", "student", "student without a teacher",
    ]  # fmt: skip
    assert student["parameters"] == alone["parameters"] < teacher["parameters"]
    # One row of 7 classes for each sentence, besides the frame of an answer to 4 of them.
    assert teacher["served"]["rows"] >= 4 * TINY["max_steps"]
    assert 7 * 3 < student["answer_bytes_per_sentence"] < 100
    assert 0 <= student["teacher_wait_share"] <= 1
    assert student["limits"] in ("teacher", "student", "link")
    assert student["batches_without_teacher"] == 0
    saved = BertForSequenceClassification.from_pretrained(teacher["saved"])
    assert sum(int(parameter.size) for parameter in saved.parameters()) == teacher["parameters"]
    report = read(tmp_path / "west" / "nebula_report.json")
    assert (report["status"], report["bytes_sent"]) == ("done", teacher["served"]["bytes_sent"])
    assert not report["degradations"]
    # The same weights at the start and the same batches: what differs is what it has learned from.
    losses = [read(tmp_path / name / "nebula_report.json")["train_loss"] for name in ("east", "alone")]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert "security: tls" in done.stdout


def test_a_teacher_ends_when_no_student_comes(tmp_path: Path) -> None:
    with pytest.raises(NebulaError, match=r"student 'east' must be there, got nothing of it for 1 s"):
        run_here(tmp_path / "out", distill_timeout_s=1)
    report = read(tmp_path / "out" / "nebula_report.json")
    assert (report["status"], report["steps"]) == ("failed", TINY["teacher_steps"])
    # What it has saved teaches without being trained again.
    with pytest.raises(NebulaError, match="must be there"):
        run_here(tmp_path / "again", distill_timeout_s=1, teacher_from=tmp_path / "out" / "teacher")
    report = read(tmp_path / "again" / "nebula_report.json")
    assert report["status"] == "failed"
    assert "steps" not in report


def test_patience_begins_anew_when_the_student_is_there(tmp_path: Path) -> None:
    from paddlenlp_nebula.distill.service import Served
    from paddlenlp_nebula.recipe.teach import Watch

    now, stopped = [0.0], list[str]()
    service = SimpleNamespace(present=(), served={"east": Served(bytes_sent=7)}, stop=stopped.append)
    watch = Watch(tmp_path / "report.json", 10, ["a sentence"], clock=lambda: now[0])
    for now[0], service.present in ((9, ()), (12, ("east",)), (21, ()), (22, ())):
        watch.look(service)  # type: ignore[arg-type]
        assert (watch.missed, stopped) == (False, [])
    report = read(tmp_path / "report.json")
    assert (report["status"], report["bytes_sent"], report["degradations"]) == ("teaching", 7, ["a sentence"])
    now[0] = 22.5
    watch.look(service)  # type: ignore[arg-type]
    assert watch.missed
    assert len(stopped) == 1


def run_here(output_dir: Path, **changes: Any) -> None:
    """The teacher, in this process."""
    from paddlenlp_nebula.launch.roster import free_ports

    place = ["--cluster", "west", *SITE, "--rendezvous", f"127.0.0.1:{free_ports(1)[0]}"]
    configuration = load_configuration("distill_encoder", [*words(output_dir, **changes), *place])
    configuration.recipe.run(configuration.arguments, configuration.nebula)


def problems_of(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        load_configuration("distill_encoder", ["--cluster", "west", *SITE, *overrides])
    return caught.value.problems


def test_problems_are_collected(tmp_path: Path) -> None:
    found = problems_of(
        "--teacher", "gpt", "--teacher_steps", "0", "--student_width", "30", "--role", "pupil", "--distill_ahead", "0",
        "--teacher_learning_rate", "2", "--teacher_from", str(tmp_path), "--distill_loss", "kl",
    )  # fmt: skip
    said = " ".join(found)
    for name in ("teacher_steps", "student_width", "teacher_learning_rate", "role", "teacher_from", "distill_ahead"):
        assert f"{name} must be" in said
    assert "teacher must be 'minilm-l6' or 'scratch', got 'gpt'" in said
    assert "must have one temperature" in said
    assert len(found) == 8


def test_what_the_recipe_knows_itself_is_no_key() -> None:
    (found,) = problems_of("--distill_teachers", "amber")
    assert "distill_teachers is not a key of this recipe" in found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--role", "student"), "got 'student' for 'west' of west,"),
        (("--cluster", "east", "--role", "teacher"), "got 'teacher' for 'east' of west,"),
        (("--clusters", "west,east,north"), "must be a teacher and a student, got 3: west, east, north"),
        (("--rendezvous", "world"), "must be the address of the teacher's door, got 'world'"),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], said: str) -> None:
    (found,) = problems_of(*overrides)
    assert said in found


def test_a_role_is_for_one_site() -> None:
    done = nebula("--local-clusters", "2", "--role", "teacher")
    assert done.returncode != 0
    assert "--role goes with --cluster (on one machine the teacher is first), got 'teacher'" in done.stderr
    done = nebula("--role", "student", "--cluster", "west", *SITE)
    assert done.returncode != 0
    assert "got 'student' for 'west' of west, east" in done.stderr
