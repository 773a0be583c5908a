"""The book of measured times: ``python -m tests.faults.figures`` prints it as two tables.

Each test run adds to nebula-faults.json in the folder for temporary files (NEBULA_FAULTS_JSON names another).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["Book", "table"]


class Book:
    """What this run has measured."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}

    def note(self, fault: str, *, seconds: float | None, limit_s: float | None, outcome: str) -> None:
        """Write down a fault.

        Args:
            fault: what was done.
            seconds: from then until the other cluster's log named it.
            limit_s: how long that may take.
            outcome: what became of the other cluster's training.
        """
        self._entries[fault] = {
            "seconds": None if seconds is None else round(seconds, 2),
            "limit_s": limit_s,
            "outcome": outcome,
            "date": datetime.date.today().isoformat(),
            "cpus": len(os.sched_getaffinity(0)),
        }

    def write(self) -> None:
        """Add to the file."""
        if self._entries:
            _path().write_text(json.dumps({**_read(), **self._entries}, indent=1) + "\n")


def table() -> str:
    """The file as Markdown: what was noticed when, and who was back when."""
    losses = ["| fault | the other log names it after | limit | the other cluster |", "|---|---|---|---|"]
    returns = ["| what comes back | together again after |", "|---|---|"]
    for fault, entry in _read().items():
        seconds = "-" if entry["seconds"] is None else f"{entry['seconds']:.2f} s"
        limit = "-" if entry["limit_s"] is None else f"{entry['limit_s']:g} s"
        if entry["outcome"].startswith("together"):
            returns.append(f"| {fault.removesuffix(': return')} | {seconds} |")
        else:
            losses.append(f"| {fault} | {seconds} | {limit} | {entry['outcome']} |")
    return "\n".join([*losses, "", *returns])


def _path() -> Path:
    return Path(os.environ.get("NEBULA_FAULTS_JSON") or Path(tempfile.gettempdir()) / "nebula-faults.json")


def _read() -> dict[str, dict[str, Any]]:
    path = _path()
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
