"""What clusters have written about themselves, read while they may still be writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddlenlp_nebula.ledger.ledger import REPORT_NAME

__all__ = ["RESULT_NAME", "bytes_text", "forget_reports", "read_report"]

RESULT_NAME = "recipe_result.json"


def read_report(directory: Path, name: str = REPORT_NAME, *, since_ns: int = 0) -> dict[str, Any]:
    """A cluster's report; empty while there is none, or only half of one.

    Args:
        directory: where the cluster writes.
        name: file name of the report, or of the recipe's result.
        since_ns: what was written before (``st_mtime_ns``) is an earlier run's and does not count.
    """
    path = directory / name
    try:
        if path.stat().st_mtime_ns < since_ns:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def forget_reports(directory: Path) -> None:
    """Remove an earlier run's report and result: they would be shown as this one's."""
    for name in (REPORT_NAME, RESULT_NAME):
        (directory / name).unlink(missing_ok=True)


def bytes_text(count: Any) -> str:
    """A number of bytes for people, in decimal units as networks use them."""
    if not isinstance(count, (int, float)):
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
