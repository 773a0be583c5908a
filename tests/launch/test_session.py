"""A run from Python, with small scripts in place of `nebula run`; the notebook's tests have the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.launch import session
from paddlenlp_nebula.launch.session import LocalRun, start_recipe

pytestmark = pytest.mark.timeout(60)

Start = Callable[[str], LocalRun]

_HEAD = """
    import json, os, pathlib, signal, sys, time
    out = pathlib.Path("out")
    def report(name, file="nebula_report.json", **content):
        (out / name).mkdir(exist_ok=True)
        (out / name / "part").write_text(json.dumps(content))
        (out / name / "part").replace(out / name / file)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a script as the run of the clusters west and east in the folder ``out``."""
    monkeypatch.chdir(tmp_path)

    def begin(body: str) -> LocalRun:
        script = textwrap.dedent(_HEAD) + textwrap.dedent(body)
        folder = tmp_path / "out"
        directories = {name: folder / name for name in ("west", "east")}
        return LocalRun([sys.executable, "-u", "-c", script], directories, folder, title="job")

    return begin


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_reports_results_and_table(start: Start) -> None:
    with start(
        """
        for name in ("west", "east"):
            report(name, steps=3, status="done", parameter_digest="abcdef", losses=[[1, 0.5]])
        report("west", "recipe_result.json", rows=[["accuracy", "0.9"]])
        report("alone", "recipe_result.json", rows=[["accuracy", "0.8"]])
        """
    ) as run:
        run.wait()
        assert run.reports()["east"]["losses"] == [[1, 0.5]]
        assert run.results() == {"west": {"rows": [["accuracy", "0.9"]]}, "east": {}}
        table = run.table()
    assert [column.header for column in table.columns] == ["", "west", "east", "alone"]
    assert repr(run) == "<LocalRun job on west, east: ended (0)>"


def test_updates_come_with_every_change_and_at_the_end(start: Start) -> None:
    run = start(
        """
        for step in (1, 2):
            report("west", steps=step)
            while not os.path.exists(f"seen{step}"):
                time.sleep(0.02)
        """
    )
    steps = []
    for reports in run.updates(every_s=0.05):
        steps.append(reports["west"].get("steps"))
        Path(f"seen{steps[-1]}").touch()
    assert steps == [1, 2, 2]


def test_what_an_earlier_run_wrote_does_not_count(start: Start) -> None:
    start("report('west', steps=3); report('alone', 'recipe_result.json', rows=[])").wait()
    time.sleep(0.02)  # the clock of file systems is coarse
    run = start("")
    run.wait()
    assert run.reports() == {"west": {}, "east": {}}
    assert run.table().row_count == 0


def test_a_failure_is_raised_with_what_was_said_last(start: Start) -> None:
    run = start("print('line'); sys.exit('2 problems: max_stps is not a key')")
    with pytest.raises(NebulaError, match=r"exit code 1; it said:\nline\n2 problems: max_stps is not a key$"):
        run.wait()


def test_a_failure_is_raised_below_the_plot(start: Start) -> None:
    with pytest.raises(NebulaError, match="the reason"):
        start("sys.exit('the reason')").watch(every_s=0.05)


def test_stop_is_polite_first_then_not(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(
        """
        signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            time.sleep(1)
        """
    )
    until(lambda: "ready" in run.log.read_text())
    monkeypatch.setattr(session, "_PATIENCE", ((signal.SIGINT, 0.3), (signal.SIGTERM, 0.3), (signal.SIGKILL, 10.0)))
    run.stop()
    assert not run.running
    assert run.log.read_text() == "ready\nasked\n"
    assert repr(run).endswith("stopped>")
    run.wait()  # stopped on purpose: no error
    run.stop()


@pytest.mark.parametrize("waiting", ["wait", "watch"])
def test_an_interrupt_while_waiting_stops_the_run(start: Start, waiting: str) -> None:
    run = start("print('ready', flush=True); time.sleep(60)")
    until(lambda: "ready" in run.log.read_text())
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        getattr(run, waiting)()
    assert not run.running


def test_two_runs_do_not_write_to_one_folder(start: Start) -> None:
    with start("time.sleep(60)"), pytest.raises(NebulaError, match=r"still writing to .*out: stop it first"):
        start("")
    start("").wait()


def test_the_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from paddlenlp_nebula.launch.session import LocalRun
run = LocalRun([sys.executable, "-c", "import time; time.sleep(60)"], {{}}, Path({str(tmp_path)!r}), title="job")
print(run._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_what_the_kernel_sets_for_its_cells_is_not_handed_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("KEPT", "yes")
    run = start("print(os.environ.get('FORCE_COLOR'), os.environ['KEPT'])")
    run.wait()
    assert run.log.read_text() == "None yes\n"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that `start_recipe` would have started."""
    monkeypatch.chdir(tmp_path)
    words: list[str] = []

    class Recorder:
        def __init__(self, command: list[str], directories: dict[str, Path], folder: Path, *, title: str) -> None:
            words.extend([*command, *map(str, directories.values()), title])

    monkeypatch.setattr(session, "LocalRun", Recorder)
    return words


def test_a_shipped_recipe_with_keys_of_every_kind(command: list[str], tmp_path: Path) -> None:
    start_recipe("finetune_lora", max_steps=3, lora=False, report_to=["visualdl", "tensorboard"], seed=None)
    at = command.index("run")
    assert command[at + 1].endswith("finetune_lora.yaml")
    assert command[at + 2 : at + 8] == [
        *("--clusters", "west,east", "--grace-s", "3.0", "--processes-per-cluster", "1"),
    ]
    assert command[at + 8 : -3] == [
        *("--max_steps", "3", "--lora", "false", "--report_to", "visualdl", "tensorboard", "--seed", "null"),
        *("--output_dir", f"{tmp_path}/runs/finetune_lora"),
    ]
    assert command[-3:] == [f"{tmp_path}/runs/finetune_lora/{name}" for name in ("west", "east")] + ["finetune_lora"]


def test_clusters_by_name_and_an_output_dir_of_ones_own(command: list[str], tmp_path: Path) -> None:
    start_recipe("finetune_lora", clusters=["oslo", "lima", "kyiv"], output_dir="mine")
    assert "oslo,lima,kyiv" in command
    assert command[-2] == f"{tmp_path}/mine/kyiv"


def test_mistakes_are_found_at_once(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("recipe: classify\n")
    with pytest.raises(ConfigurationError, match="output_dir must be set"):
        start_recipe("job.yaml")
    with pytest.raises(ConfigurationError, match="did you mean 'finetune_lora'"):
        start_recipe("finetune_lra")
    with pytest.raises(ConfigurationError, match="--local-clusters must be 1 to 64"):
        start_recipe("finetune_lora", local_clusters=0)
    assert not command
