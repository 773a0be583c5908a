"""Kernels are compiled once where a folder can be written, and run where none can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paddlenlp_nebula

PACKAGE = Path(paddlenlp_nebula.__file__).parent
KERNEL = """
from numba import types
from paddlenlp_nebula.codec.kernels import FLOATS, kernel

@kernel(types.void(FLOATS))
def twice(x):
    for i in range(len(x)):
        x[i] *= 2
"""
PROGRAM = """
import numpy as np
from paddlenlp_nebula.codec.kernels.twice import twice
x = np.ones(3, np.float32)
twice(x)
print(x.sum(), sum(twice.stats.cache_hits.values()))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the package with one small kernel more."""
    shutil.copytree(PACKAGE, tmp_path / "site" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site" / PACKAGE.name / "codec" / "kernels" / "twice.py").write_text(KERNEL)
    return tmp_path / "site"


def run(site: Path, cache: Path) -> list[str]:
    """What the kernel computes, and whether it came from the cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=site, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_cache_lies_beside_the_module(site: Path, tmp_path: Path) -> None:
    assert [run(site, tmp_path / "cache") for _ in range(2)] == [["6.0", "0"], ["6.0", "1"]]
    assert not (tmp_path / "cache").exists()


def test_or_in_the_users_folder(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE.name / "codec" / "kernels" / "__pycache__").touch()  # not even root writes below a file
    assert [run(site, tmp_path / "cache") for _ in range(2)] == [["6.0", "0"], ["6.0", "1"]]
    assert list((tmp_path / "cache").rglob("*.nbi"))


def test_or_nowhere(site: Path, tmp_path: Path) -> None:
    (site / PACKAGE.name / "codec" / "kernels" / "__pycache__").touch()
    (tmp_path / "cache").touch()
    assert [run(site, tmp_path / "cache") for _ in range(2)] == [["6.0", "0"], ["6.0", "0"]]
