"""What a figure is worth nothing without: the command, the date, the versions, the machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["facts"]

_PACKAGES = (
    "paddlenlp-nebula",
    "paddlepaddle",
    "paddlenlp",
    "mpi4py",
    "mpich",
    "numpy",
    "numba",
    "xxhash",
    "pypiquant",
    "torch",
)


def facts(command: Sequence[str] | None = None) -> dict[str, Any]:
    """command, date, versions, cpu and cpu_count of this measurement.

    Args:
        command: what was run, by default this process' own arguments.
    """
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]] if command is None else command
    return {
        "command": shlex.join(words),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "linux": platform.release(), **_versions()},
        "cpu": _cpu(),
        "cpu_count": len(os.sched_getaffinity(0)),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
