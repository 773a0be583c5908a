"""benchmarks/core.py in its tiny size: every figure is there, and those that no clock decides are met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("core") / "core.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "core.py"), "--tiny", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(output.read_text())


def figures(result: dict) -> dict[str, dict]:
    return {entry["name"]: entry for entry in result["figures"]}


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_every_figure_is_there(result: dict) -> None:
    assert {"command", "date", "versions", "cpu_count", "figures", "rows"} <= result.keys()
    assert all(entry.keys() == {"name", "value", "unit", "target", "met"} for entry in result["figures"])
    names = " | ".join(figures(result))
    for words in (
        "bytes per parameter",
        "memory of the leader",
        "seconds per round",
        "LoRA",
        "loopback",
        "bare MPI",
        "10000 Mbit/s",
    ):
        assert words in names
    dense = result["rows"][0]
    assert {"gather", "encode", "wait", "reduce", "write", "digest"} <= dense["seconds_by_phase"].keys()


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bytes per parameter and direction, fp32", 4.04),
        ("bytes per parameter and direction, bf16", 2.02),
        ("LoRA run: bytes sent beyond the adapters", 2.0),
        ("framing overhead", 1.0),
    ],
)
def test_bytes_are_what_was_promised(result: dict, name: str, limit: float) -> None:
    entry = figures(result)[name]
    assert 0 < entry["value"] <= limit
    assert entry["met"] is True


def test_the_committed_result_has_all_figures() -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "core.json").read_text())
    assert committed["command"].startswith("python benchmarks/core.py")
    assert {"date", "versions", "cpu_count", "figures", "rows"} <= committed.keys()
    assert all(entry["value"] is not None for entry in committed["figures"])
