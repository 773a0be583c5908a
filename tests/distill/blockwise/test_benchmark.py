"""The benchmark of both schemes runs, and they learn the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "blockwise.py"


def test_relaying_and_recomputing_learn_the_same():
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--tiny"], check=True, capture_output=True, text=True, timeout=100
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["largest_relative_difference_of_losses"] < 1e-5  # two halves are averaged: not to the bit
    assert found["speed_up"] > 0
