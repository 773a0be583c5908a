"""Over real couriers, MPI and TLS: a teacher here, its students in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.distill.service import Service
from paddlenlp_nebula.link.star import open_star
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.throwaway import throw_away
from tests.link.clusters import at_once

from .school import answer, offer

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
ROSTER = ("amber", "birch", "cedar")


@pytest.fixture
def where() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def service(where: str, tmp_path: Path) -> Iterator[Service]:
    files = throw_away(ROSTER, tmp_path)
    star = open_star("amber", ROSTER, where, timeout_s=30, report=print, identity=Identity(files["amber"]))
    yield Service(star, offer(), answer)
    star.close()


def pupil(name: str, where: str, folder: Path, batches: int, step_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distill.pupil", name, where, str(folder), str(batches), str(step_s)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPIR_CVAR_NOLOCAL": "1"},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_students_in_other_processes_one_of_them_killed(service: Service, where: str, tmp_path: Path) -> None:
    def lesson() -> list[dict[str, Any]]:
        birch, cedar = pupil("birch", where, tmp_path, 10_000, 0.01), pupil("cedar", where, tmp_path, 60, 0.02)
        assert birch.stdout is not None
        assert birch.stdout.readline() == ".\n"
        birch.kill()
        birch.wait(10)
        figures = [finish(cedar)]
        return [*figures, finish(pupil("birch", where, tmp_path, 20, 0.0))]

    outcomes = at_once({"amber": service.serve, "students": lesson}, timeout_s=110)
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes.values()), outcomes
    cedar, birch = outcomes["students"]
    assert (cedar["right"], birch["right"]) == (60, 20)
    assert (service.served["birch"].losses, service.served["cedar"].losses) == (1, 0)
    assert (cedar["losses"], cedar["without"]) == (0, 0)
