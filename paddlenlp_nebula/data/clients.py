"""Runs the package clients that are already on the machine; there is no network code of our own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_nebula.errors import NebulaError

__all__ = ["DataUnavailable", "run_client"]


class DataUnavailable(NebulaError):
    """A text or a model cannot be fetched, or is not what it should be."""


def run_client(command: Sequence[str], *, folder: Path, purpose: str, otherwise: str) -> str:
    """Run a client in ``folder`` and return what it printed.

    Args:
        command: program and arguments.
        folder: working directory, where downloads land.
        purpose: what the client is to do, for the error message ("fetch the package X").
        otherwise: what the user can do when it fails.

    Raises:
        DataUnavailable: if the program is missing or fails.
    """
    if shutil.which(command[0]) is None:
        raise DataUnavailable(f"cannot {purpose}: the program {command[0]!r} is not on this machine; {otherwise}")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise DataUnavailable(
            f"cannot {purpose}: `{' '.join(command)}` ended with {done.returncode} and said {said[-1]!r}; {otherwise}"
        )
    return done.stdout
