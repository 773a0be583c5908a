"""Over an emulated wide-area line, with couriers, MPI and TLS: nobody waits for the line, and a dead teacher is found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.security.throwaway import throw_away
from tests.support.wan import Site, WideArea, available, wide_area

REASON = available(delay=True)
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ROOT = Path(__file__).resolve().parents[2]
_TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


@pytest.fixture
def wan() -> Iterator[WideArea]:
    with wide_area(("west", "east"), rate_mbit=100, rtt_ms=50) as wan:
        yield wan


def begin(site: Site, *words: str) -> subprocess.Popen[str]:
    return site.popen(
        [sys.executable, "-m", "tests.distill.pupil", *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **_TCP, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def dots(process: subprocess.Popen[str], count: int) -> None:
    """Wait for so many further batches."""
    assert process.stdout is not None
    while count:
        line = process.stdout.readline()
        assert line, "it has ended"
        count -= line == ".\n"


def test_a_long_line_keeps_nobody_waiting_and_a_killed_teacher_is_found_again(wan: WideArea, tmp_path: Path) -> None:
    throw_away(("amber", "birch", "cedar"), tmp_path)
    west, east, where = wan["west"], wan["east"], f"{wan['west'].address}:7000"
    teacher = begin(west, "amber", where, str(tmp_path), "0", "0.01")
    try:
        birch = begin(east, "birch", where, str(tmp_path), "200", "0.02")  # a step is shorter than a round trip
        found = figures(birch)
        assert found["right"] == 200
        assert found["limits"] != "teacher", found
        assert 4 <= found["depth"] <= 12, found
        assert found["seconds_waiting"] < 0.5 * 200 * 0.05, found  # one by one: 200 round trips

        cedar = begin(east, "cedar", where, str(tmp_path), "1200", "0.02")
        dots(cedar, 20)
        teacher.kill()
        teacher.wait(10)
        teacher = begin(west, "amber", where, str(tmp_path), "0", "0.01")
        found = figures(cedar)
        assert (found["losses"], found["returns"]) == (1, 1), found
        assert found["right"] + found["without"] == 1200
        assert found["right"] > 300, found
    finally:
        teacher.kill()
        teacher.wait(10)
