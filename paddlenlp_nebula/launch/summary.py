"""The table at the end of ``nebula run``: one column per cluster, built from what the clusters wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from paddlenlp_nebula.launch.reports import RESULT_NAME, bytes_text, read_report
from paddlenlp_nebula.ledger.ledger import REPORT_NAME

__all__ = ["degradations", "digests_differ", "summary_table"]

_SHOWN_DEGRADATIONS = 10
_FULL_MODEL = ("bytes_full_model_fp32_every_step", "bytes_dense_fp32_every_step")


def summary_table(directories: Mapping[str, Path], title: str) -> Table:
    """The clusters' reports and recipe results side by side.

    Args:
        directories: column -> the output directory it shows.
        title: above the table.
    """
    reports = {name: read_report(directory) for name, directory in directories.items()}
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in directories:
        table.add_column(name, justify="right")
    for label, show in _ROWS:
        cells = [show(report) for report in reports.values()]
        if any(cells):
            table.add_row(label, *(cell or "-" for cell in cells))
    digests = [_digest(report, reports) for report in reports.values()]
    if any(digests):
        table.add_row("parameters", *(cell or "-" for cell in digests))
    recipe_rows = _recipe_rows(directories)
    if recipe_rows:
        table.add_section()
        for label, values in recipe_rows.items():
            table.add_row(label, *(values.get(name, "-") for name in directories))
    return table


def degradations(directories: Mapping[str, Path]) -> dict[str, list[str]]:
    """What went less well than asked for: sentence -> the clusters that say so. Of many, the first ten of each."""
    found: dict[str, list[str]] = {}
    for name, directory in directories.items():
        sentences = read_report(directory).get("degradations") or []
        rest = len(sentences) - _SHOWN_DEGRADATIONS
        more = [f"{rest} more, in {directory / REPORT_NAME}"] if rest > 0 else []
        for sentence in [*sentences[:_SHOWN_DEGRADATIONS], *more]:
            found.setdefault(str(sentence), []).append(name)
    return found


def digests_differ(directories: Mapping[str, Path]) -> bool:
    """Whether two clusters report different parameters at their end."""
    digests = {read_report(directory).get("parameter_digest") for directory in directories.values()}
    return len(digests - {None}) > 1


def _plain(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda report: "" if report.get(key) is None else str(report[key])


def _formatted(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda report: format(report[key], form) if isinstance(report.get(key), (int, float)) else ""


def _full_model(report: Mapping[str, Any]) -> int | float | None:
    return next((report[key] for key in _FULL_MODEL if isinstance(report.get(key), (int, float))), None)


def _reduction(report: Mapping[str, Any]) -> str:
    full, sent = _full_model(report), report.get("bytes_sent")
    return f"{full / sent:,.1f} x" if full and isinstance(sent, (int, float)) and sent > 0 else ""


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("status", _plain("status")),
    ("steps", _plain("steps")),
    ("rounds of exchange", _plain("rounds")),
    ("mean training loss", _formatted("train_loss", ".4f")),
    ("evaluation loss", _formatted("eval_loss", ".4f")),
    ("evaluation accuracy", _formatted("eval_accuracy", ".3f")),
    ("sent", lambda report: bytes_text(report["bytes_sent"]) if "bytes_sent" in report else ""),
    ("full model every step", lambda report: bytes_text(full) if (full := _full_model(report)) else ""),
    ("less by", _reduction),
    ("busy training", _formatted("utilisation", ".1%")),
    ("degradations", lambda report: str(len(report["degradations"])) if report.get("degradations") else ""),
)


def _digest(report: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> str:
    """This cluster's digest and, where there is another to compare with, whether it is that of the first one."""
    digest = report.get("parameter_digest")
    if digest is None:
        return ""
    known = [other["parameter_digest"] for other in reports.values() if other.get("parameter_digest") is not None]
    if len(known) == 1:
        return str(digest)[:8]
    return f"{str(digest)[:8]} {'[green]equal[/]' if digest == known[0] else '[bold red]DIFFERENT[/]'}"


def _recipe_rows(directories: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """label -> column -> value, in the order in which the recipes wrote them."""
    rows: dict[str, dict[str, str]] = {}
    for name, directory in directories.items():
        for row in read_report(directory, RESULT_NAME).get("rows", []):
            if isinstance(row, list) and len(row) == 2:
                rows.setdefault(str(row[0]), {})[name] = str(row[1])
    return rows
