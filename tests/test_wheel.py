"""What users install is the wheel, so a run from it, away from the tree, is the test that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, built and unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("paddlenlp_nebula-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder / "site"


def _run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_wheel_is_what_is_imported_and_light(installed, tmp_path):
    code = "import sys, paddlenlp_nebula as n; print(n.__file__, 'paddle' in sys.modules, 'mpi4py' in sys.modules)"
    run = _run(installed, tmp_path, "-c", code)
    assert run.stdout.split() == [str(installed / "paddlenlp_nebula" / "__init__.py"), "False", "False"], run.stderr
    assert (installed / "paddlenlp_nebula" / "py.typed").is_file()
    assert list(installed.glob("*.dist-info/licenses/**/NOTICE"))


def test_the_shipped_recipe_runs_on_two_clusters(installed, tmp_path):
    words = ["--local-clusters", "2", "--model", "scratch", "--max_steps", "3", "--no_compare_alone"]
    run = _run(installed, tmp_path, "-m", "paddlenlp_nebula.cli", "run", "finetune_lora", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    west, east = (
        json.loads((tmp_path / "runs" / "finetune_lora" / cluster / "nebula_report.json").read_text())
        for cluster in ("west", "east")
    )
    assert west["parameter_digest"] == east["parameter_digest"]
    assert west["rounds"] == west["steps"] == 3
    assert "same predictions" in run.stdout  # of the reloaded adapter
