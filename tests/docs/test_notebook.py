"""The notebook: executed as a user would, interrupted, restarted, killed; and fit to be committed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from nbclient import NotebookClient

import paddlenlp_nebula
from tests.support.scalars import scalars

NOTEBOOK = Path(paddlenlp_nebula.__file__).parents[1] / "docs" / "notebooks" / "finetune_two_clusters.ipynb"
SMALL = {"model": "scratch", "max_length": 16, "eval_sentences": 32, "compare_alone": False, "logging_steps": 1}

Living = Callable[[], list[psutil.Process]]


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Living]:
    """Lists the processes that this test has started, kernels left out; the notebook runs in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEBULA_TEST_MARK", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("NEBULA_TEST_MARK") == str(tmp_path)
                if marked and process != psutil.Process() and "ipykernel_launcher" not in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    yield find
    for process in find():
        process.kill()


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def notebook(**settings: Any) -> nbformat.NotebookNode:
    """The notebook without outputs, with other settings in its cell of parameters."""
    content = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (cell for cell in content.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = f"settings = { ({**SMALL, **settings})!r}"
    for cell in code_cells(content):
        cell.outputs, cell.execution_count = [], None
    return content


def code_cells(content: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in content.cells if cell.cell_type == "code"]


def cell_with(content: nbformat.NotebookNode, text: str) -> nbformat.NotebookNode:
    (cell,) = (cell for cell in code_cells(content) if text in cell.source)
    return cell


def text_of(cell: nbformat.NotebookNode) -> str:
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts))  # without colours


def check_outputs(content: nbformat.NotebookNode) -> None:
    (plot,) = cell_with(content, "run.watch()").outputs
    assert len(plot.data["image/png"]) > 20_000
    table = text_of(cell_with(content, "run.table()"))
    for row in ("accuracy", "majority class", "sent", "full model every step"):
        assert row in table
    assert table.count(" equal") == 2
    prediction = text_of(cell_with(content, "sentence ="))
    assert re.findall(r"^ *\d+%  [A-Z][a-z]+$", prediction, re.MULTILINE)
    assert "ended (0)" in text_of(cell_with(content, "run.stop()"))


@pytest.mark.mpi
@pytest.mark.timeout(400)
def test_runs_from_top_to_bottom_and_leaves_nothing(living: Living, tmp_path: Path) -> None:
    content = notebook(max_steps=4)
    NotebookClient(
        content, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    check_outputs(content)
    for cluster in ("west", "east"):
        (folder,) = (tmp_path / "runs/finetune_lora" / cluster / "runs").iterdir()
        curves = scalars(folder)  # for VisualDL
        assert curves["nebula_rounds"][:4] == [(1, 1), (2, 2), (3, 3), (4, 4)]
        sent = [value for _, value in curves["nebula_mb_sent"]]
        assert 0 < sent[0] < sent[1] < sent[2] < sent[3]
    wait_for(lambda: not living(), 10)


@pytest.fixture
def kernel(living: Living) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel of its own for each test, with the run started."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        content = notebook(max_steps=100_000)
        for cell in code_cells(content)[:2]:
            reply = client.execute_interactive(cell.source, timeout=60, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok", reply["content"]
        wait_for(lambda: any("NEBULA_CLUSTER" in process.environ() for process in living()), 90)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_interrupting_the_watching_cell_ends_every_process(
    kernel: tuple[KernelManager, BlockingKernelClient], living: Living, tmp_path: Path
) -> None:
    manager, client = kernel
    client.execute("run.watch()")
    report = tmp_path / "runs/finetune_lora/west/nebula_report.json"
    wait_for(lambda: report.exists() and json.loads(report.read_text())["losses"], 120)
    assert len(living()) >= 3  # nebula run and two trainers at least
    manager.interrupt_kernel()
    wait_for(lambda: not living(), 10)
    reply = client.get_shell_msg(timeout=10)
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    # The kernel is as good as before, and knows how it ended.
    client.execute_interactive("assert 'stopped' in repr(run)", timeout=10)


@pytest.mark.mpi
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_nothing_outlives_the_kernel(
    kernel: tuple[KernelManager, BlockingKernelClient], living: Living, how: str
) -> None:
    manager, _ = kernel
    if how == "restart":
        manager.restart_kernel()
    else:
        manager.shutdown_kernel(now=True)
    wait_for(lambda: not living(), 10)


def test_the_committed_notebook_shows_a_complete_run_of_no_particular_machine() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(content)
    counts = [cell.execution_count for cell in code_cells(content)]
    assert counts == list(range(1, len(counts) + 1)), "run all cells of a fresh kernel, then save"
    check_outputs(content)
    assert "MiniLM-L6" in text_of(cell_with(content, "run.table()"))
    for cell in code_cells(content):
        assert not [
            output for output in cell.outputs if output.output_type == "error" or output.get("name") == "stderr"
        ]
        for output in cell.outputs:
            texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
            assert not re.search(r"(?<![\w<])/(?:\w[\w.-]*/)+", "\n".join(texts)), "a path of this machine"
