"""`nebula run`: what it starts, shows and concludes. The worker is a small script here; real recipes have their own tests."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import paddlenlp_nebula.cli.run as run_module
from paddlenlp_nebula.cli.main import main
from paddlenlp_nebula.cli.progress import Board
from paddlenlp_nebula.launch.reports import bytes_text, read_report
from paddlenlp_nebula.launch.summary import digests_differ, summary_table

pytestmark = pytest.mark.timeout(60)

Runner = Callable[..., Result]

_WORKER = """
    import json, os, pathlib, sys
    words = sys.argv[1:]
    answer = dict(problems=PROBLEMS, recipe="r", output_dir="out", max_steps=3, compare_alone=ALONE)
    if words[0] == "--check-into":
        pathlib.Path(words[1]).write_text(json.dumps(answer))
        sys.exit(0)
    me = os.environ["NEBULA_CLUSTER"]
    last = {key: value for key, value in zip(words, words[1:])}
    out = pathlib.Path(last["--output_dir"])
    print("words", words)
    report = dict(cluster=me, steps=3, max_steps=3, status="done", rounds=3, train_loss=0.5, bytes_sent=1_000_000,
                  bytes_full_model_fp32_every_step=400_000_000, utilisation=0.97, rtt_ms=1.5, parameter_digest=DIGEST)
    (out / "nebula_report.json").write_text(json.dumps(report))
    (out / "recipe_result.json").write_text(json.dumps({"rows": [["accuracy", "0.9" if "--alone" in words else "0.95"]]}))
    END
"""


@pytest.fixture
def nebula_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs `nebula run` in an empty directory with a worker of the given behaviour."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("clusters: west,east\nrendezvous: h.example:29400\n")

    def invoke(*words: str, problems: str = "[]", alone: bool = False, digest: str = "'abcd'", end: str = "") -> Result:
        text = textwrap.dedent(_WORKER).replace("PROBLEMS", problems).replace("ALONE", str(alone))
        worker = tmp_path / "worker.py"
        worker.write_text(text.replace("DIGEST", digest).replace("END", end))
        monkeypatch.setattr(run_module, "_WORKER", worker)
        return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["run", "job.yaml", *words])

    return invoke


def words_of(name: str) -> list[str]:
    line = Path("out", name, "cluster.log").read_text().splitlines()[0]
    words = eval(line.removeprefix("words "))
    assert isinstance(words, list)
    return words


def test_clusters_of_one_machine(nebula_run: Runner) -> None:
    result = nebula_run("--local-clusters", "2", "--max_steps", "3", "--no_lora")
    assert result.exit_code == 0, result.output
    for name in ("west", "east"):
        words = words_of(name)
        assert words[1:4] == ["--max_steps", "3", "--no_lora"]
        assert words[4:8] == ["--cluster", name, "--clusters", "west,east"]
        assert words[-2:] == ["--output_dir", f"out/{name}"]
    for shown in ("west", "east", "1 MB", "400 MB", "400.0 x", "97.0%", "abcd equal", "0.95"):
        assert shown in result.output


def test_two_runs_do_not_write_to_one_folder(nebula_run: Runner) -> None:
    Path("out/east").mkdir(parents=True)
    Path("out/east/nebula_report.json").write_text("the other run's")
    with run_module._only_run_in(Path("out/east")):
        result = nebula_run("--local-clusters", "2")
        assert result.exit_code == 2
        assert "a run is still writing to out/east: end it first, or set another --output_dir" in result.output
        assert Path("out/east/nebula_report.json").read_text() == "the other run's"
        assert not Path("out/west/cluster.log").exists()
    assert nebula_run("--local-clusters", "2").exit_code == 0


def test_overrides_may_come_before_and_between_options(nebula_run: Runner) -> None:
    result = nebula_run("--max_steps=3", "--local-clusters", "2", "--learning_rate", "-1")
    assert result.exit_code == 0, result.output
    assert words_of("west")[1:4] == ["--max_steps=3", "--learning_rate", "-1"]


def test_options_may_be_written_as_paddlenlps_are(nebula_run: Runner) -> None:
    result = nebula_run("--local_clusters", "2", "--max_steps", "3")
    assert result.exit_code == 0, result.output
    assert words_of("west")[1:3] == ["--max_steps", "3"]


def test_one_site_takes_the_rest_from_the_recipe(nebula_run: Runner) -> None:
    result = nebula_run("--cluster", "east")
    assert result.exit_code == 0, result.output
    assert "east of 2 clusters" in result.output
    assert words_of("east")[1:7] == [
        *("--cluster", "east", "--clusters", "west,east", "--rendezvous", "h.example:29400"),
    ]
    assert not Path("out/west").exists()
    assert "abcd" in result.output
    assert "equal" not in result.output  # there is nothing to compare with


def test_problems_are_shown_together_and_nothing_starts(nebula_run: Runner) -> None:
    result = nebula_run("--local-clusters", "2", problems="['first', 'second']")
    assert result.exit_code == 2
    assert "2 problems:\n  - first\n  - second" in result.output
    assert not Path("out").exists()


def test_a_failing_cluster_is_named_with_the_end_of_its_log(nebula_run: Runner) -> None:
    result = nebula_run("--local-clusters", "2", end="sys.exit('the reason') if me == 'east' else None")
    assert result.exit_code == 1
    assert "cluster east ended with exit code 1" in result.output
    assert "| the reason" in result.output
    assert "cluster west ended" not in result.output


def test_a_refusal_is_shown_instead_of_its_traceback(nebula_run: Runner) -> None:
    error = "type('HandshakeError', (Exception,), {'__module__': 'paddlenlp_nebula.errors'})('the reason')"
    result = nebula_run("--local-clusters", "2", end=f"raise {error}")
    assert result.exit_code == 1
    assert "nebula: cluster east ended with exit code 1; its log is out/east/cluster.log\n" in result.output
    assert result.output.count("the reason") == 1
    assert "Traceback" not in result.output


def test_different_digests_are_a_failure(nebula_run: Runner) -> None:
    result = nebula_run("--local-clusters", "2", digest="me")
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output
    assert "ended with different parameters" in result.output


def test_comparison_with_one_cluster_alone(nebula_run: Runner) -> None:
    result = nebula_run("--local-clusters", "2", alone=True)
    assert result.exit_code == 0, result.output
    words = words_of("alone")
    assert words[0] == "--alone"
    assert words[words.index("--cluster") + 1] == "west"
    assert words[words.index("--clusters") + 1] == "west,east"
    assert words[-1] == "out/alone"
    assert "alone" in result.output
    assert "0.9 " in result.output


def test_an_earlier_report_is_not_taken_for_this_one(nebula_run: Runner) -> None:
    nebula_run("--local-clusters", "2")
    result = nebula_run("--local-clusters", "2", end="", digest="sys.exit(3)")
    assert result.exit_code == 3
    assert "abcd" not in result.output


@pytest.mark.parametrize("content", [None, "", '{"steps": 1', "[1]", "null", "\x00"])
def test_missing_and_half_reports_are_tolerated(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "nebula_report.json").write_text(content)
    assert read_report(tmp_path) == {}
    assert summary_table({"west": tmp_path}, "t").row_count == 0
    assert not digests_differ({"west": tmp_path})


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (123_456, "123 kB"),
        (5.6e9, "5.6 GB"),
        (2e15, "2e+03 TB"),
        (None, "-"),
    ],
)
def test_bytes_for_people(count: Any, text: str) -> None:
    assert bytes_text(count) == text


def test_plain_lines_now_and_then(tmp_path: Path) -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=False, width=200)
    with Board(console, {"west": tmp_path / "w", "east": tmp_path / "e"}, clock=lambda: now[0]) as board:
        (tmp_path / "w").mkdir()
        report = {"steps": 7, "max_steps": 20, "status": "training", "train_loss": 1.25, "bytes_sent": 2048}
        (tmp_path / "w/nebula_report.json").write_text(json.dumps(report))
        for second in range(75):  # nothing new for 60 s
            now[0] = second
            board.tick()
        (tmp_path / "e").mkdir()
        (tmp_path / "e/nebula_report.json").write_text(json.dumps(report))
    line = "west: 7/20 training, loss 1.250, sent 2.05 kB | east: "
    assert out.getvalue().splitlines() == [f"{line}starting", f"{line}starting", line + line[6:-9]]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_the_package_says_in_the_logs_is_shown_at_once(tmp_path: Path, terminal: bool) -> None:
    out, now, log = io.StringIO(), [0.0], tmp_path / "cluster.log"
    with Board(
        Console(file=out, force_terminal=terminal, width=200), {"west": tmp_path}, clock=lambda: now[0]
    ) as board:
        for text in (
            "\x1b[32m[2026-11-30 18:59:00,014] [    INFO]\x1b[0m - nebula: still waiting for 'east' to kn",
            "ock at h:1, 590 s more\x1b[0m\n\x1b[32m[2026-11-30 18:59:00,014] [    INFO]\x1b[0m - loss: 1\x1b[0m\n",
        ):
            with log.open("a") as file:
                file.write(text)
            now[0] += 1
            board.tick()
        assert out.getvalue().count("west: still waiting for 'east' to knock at h:1, 590 s more\n") == 1
        log.open("a").write("TrainProcess: 1/4\r[2026-11-30 18:59:00,014] [ WARNING] - nebula: cluster east is gone\n")
    assert out.getvalue().count("west: cluster east is gone\n") == 1
    assert "loss: 1" not in out.getvalue()


def test_degradations_are_named_at_the_end(nebula_run: Runner) -> None:
    result = nebula_run(
        "--local-clusters", "2",
        end="(out / 'nebula_report.json').write_text(json.dumps(dict(report, degradations=['both'] + [me] * 10)))",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "nebula: west, east: both\n" in result.output
    assert "nebula: west, east: 1 more, in " not in result.output  # each in a report of its own
    assert "nebula: east: 1 more, in out/east/nebula_report.json\n" in result.output


def test_the_last_loss_is_shown_and_that_the_process_still_works(tmp_path: Path) -> None:
    report = {"steps": 20, "max_steps": 20, "status": "done", "train_loss": 1.9, "losses": [[10, 2.5], [20, 1.25]]}
    (tmp_path / "nebula_report.json").write_text(json.dumps(report))
    out = io.StringIO()
    with Board(Console(file=out, force_terminal=False, width=200), {"west": tmp_path}, line_every_s=0) as board:
        board.tick()
        board.ended("west", "done")
    assert out.getvalue().splitlines() == ["west: 20/20 finishing, loss 1.250", "west: 20/20 done, loss 1.250"]


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Board(console, {"west": tmp_path}) as board:
        (tmp_path / "nebula_report.json").write_text('{"steps": 5, "max_steps": 10, "status": "waiting"}')
        board.tick()
        board.ended("west", "done")
    assert "5/10" in out.getvalue()
    assert "waiting" in out.getvalue()
    assert "done" in out.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ended_while_the_recipe_is_checked_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "paddlenlp_nebula.cli", "run", "finetune_lora", "--local-clusters", "2"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None
        time.sleep(0.02)
    assert list(tmp_path.glob("*/west.key"))
    process.send_signal(number)
    assert process.wait(20) != 0
    assert list(tmp_path.iterdir()) == []
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)
