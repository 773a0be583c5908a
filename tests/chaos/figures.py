"""The figures of chaos runs as a table."""

from __future__ import annotations

from typing import Any

__all__ = ["gap_percent", "table"]


def gap_percent(loss: float | None, undisturbed: float | None) -> float | None:
    """How much higher a loss is than without faults, percent; None where one of them is missing."""
    return None if loss is None or undisturbed is None else 100 * (loss / undisturbed - 1)


_ROWS = {
    "faults injected": "faults_injected",
    "hangs": "hangs",
    "losses that nobody reported": "unreported_losses",
    "losses without a reason": "needless_losses",
    "returns": "returns",
    "samples that were trained on alone and dropped": "samples_dropped",
    "rounds": "rounds",
    "of them without somebody": "rounds_lost",
    "bytes sent": "bytes_sent",
    "bytes sent again": "bytes_resent",
    "equal parameters at the end": "digests_equal",
    "loss against an undisturbed run": "loss_gap_percent",
    "seconds": "duration_s",
}


def table(found: dict[str, Any]) -> str:
    """Chaos runs in Markdown, a column per setting, and the goodput below."""
    runs = {name: run for name, run in found.items() if name != "goodput"}
    rows = []
    if runs:
        heads = [f"{name}, seed {run['setting']['seed']}" for name, run in runs.items()]
        rows += [f"| | {' | '.join(heads)} |", "|---" * (len(runs) + 1) + "|"]
        rows += [
            f"| {words} | {' | '.join(_cell(key, run[key]) for run in runs.values())} |" for words, key in _ROWS.items()
        ]
    if "goodput" in found:
        run = found["goodput"]
        rows.append(
            f"One of two clusters away {run['away_share']:.1%} of the time: goodput {run['goodput']:.1%}, "
            f"{run['samples_dropped']:g} samples dropped."
        )
    return "\n".join(rows)


def _cell(key: str, value: Any) -> str:
    if isinstance(value, list):
        return str(len(value))
    if value is None:
        return "-"
    if key == "loss_gap_percent":
        return f"{value:+.2f} %"
    if key.startswith("bytes"):
        return f"{value / 1e6:.1f} MB"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:g}"
