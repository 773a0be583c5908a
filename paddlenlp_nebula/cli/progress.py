"""What one sees while clusters train: a bar each on a terminal, a plain line now and then elsewhere, and what the
package has to say in their logs: whom they wait for, what has gone wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from paddlenlp_nebula.launch.lines import NoticeReader
from paddlenlp_nebula.launch.reports import bytes_text, read_report

__all__ = ["Board"]

_POLL_EVERY_S = 0.5
_UNCHANGED = 6  # a line that says nothing new is left out so many times less one


def _number(report: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    value = report.get(key)
    return format(value * scale, form) if isinstance(value, (int, float)) else "-"


class Board:
    """Shows the reports and logs of ``directories`` (cluster -> where it writes) whenever ``tick`` is called.

    Args:
        console: where to.
        directories: cluster -> its output directory.
        line_every_s: time between two plain lines, when ``console`` is not a terminal; six times that between two
            that say the same.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        console: Console,
        directories: Mapping[str, Path],
        *,
        line_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._directories = directories
        self._line_every_s = line_every_s
        self._clock = clock
        self._next_line = clock() + line_every_s
        self._next_poll = 0.0
        self._line, self._left_out = "", 0
        self._notices = {name: NoticeReader(directory / "cluster.log") for name, directory in directories.items()}
        self._ended: dict[str, str] = {}
        self._tasks: dict[str, TaskID] = {}
        # Refreshed by tick: the refreshing thread that rich would start must not exist while processes are forked.
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[steps]}"),
            TextColumn("[cyan]{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            for name in self._directories:
                self._tasks[name] = self._progress.add_task(name, total=None, steps="", facts="starting")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show_notices()
        if self._tasks:
            self._show_bars()
            self._progress.stop()
        elif kind is None:
            self._show_line()

    def ended(self, name: str, how: str) -> None:
        """A cluster's processes have ended; ``how`` replaces the status that its report gives."""
        self._ended[name] = how

    def tick(self) -> None:
        """Look at reports and logs, twice a second at most, and show them."""
        now = self._clock()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_EVERY_S
        self._show_notices()
        if self._tasks:
            self._show_bars()
        elif now >= self._next_line:
            self._next_line = now + self._line_every_s
            self._show_line()

    def _show_notices(self) -> None:
        for name, notices in self._notices.items():
            for sentence in notices.new():
                self._console.print(f"{name}: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def _show_bars(self) -> None:
        for name, task in self._tasks.items():
            report = read_report(self._directories[name])
            steps, most = report.get("steps"), report.get("max_steps")
            total = most if isinstance(most, int) and most > 0 else None
            completed = steps if isinstance(steps, int) else 0
            self._progress.update(
                task, total=total, completed=completed, steps=_steps(report), facts=self._facts(name, report)
            )
        self._progress.refresh()

    def _show_line(self) -> None:
        parts = []
        for name, directory in self._directories.items():
            report = read_report(directory)
            parts.append(f"{name}: {' '.join(filter(None, [_steps(report), self._facts(name, report)]))}")
        line = " | ".join(parts)
        self._left_out += 1
        if line != self._line or self._left_out == _UNCHANGED:
            self._line, self._left_out = line, 0
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _facts(self, name: str, report: Mapping[str, Any]) -> str:
        facts = [self._ended.get(name) or _status(report) or "starting"]
        if (loss := _last_loss(report)) is not None:
            facts.append(f"loss {loss:.3f}")
        if report.get("bytes_sent"):
            facts.append(f"sent {bytes_text(report['bytes_sent'])}")
        if isinstance(report.get("utilisation"), (int, float)):
            facts.append(f"busy {_number(report, 'utilisation', '.0f', 100)} %")
        if isinstance(report.get("rtt_ms"), (int, float)):
            facts.append(f"rtt {_number(report, 'rtt_ms', '.3g')} ms")
        return ", ".join(facts)


def _steps(report: Mapping[str, Any]) -> str:
    if not isinstance(report.get("steps"), int):
        return ""
    most = report.get("max_steps")
    return f"{report['steps']}/{most}" if isinstance(most, int) and most > 0 else str(report["steps"])


def _status(report: Mapping[str, Any]) -> str:
    """How the training is; when it is done but the process still runs, that evaluates, saves, and so on."""
    status = str(report.get("status", ""))
    return "finishing" if status == "done" else status


def _last_loss(report: Mapping[str, Any]) -> float | None:
    """The loss as last logged; a finished training reports the mean of them all as its ``train_loss``."""
    losses = report.get("losses")
    if isinstance(losses, list) and losses and isinstance(losses[-1], list):
        loss = losses[-1][-1]
    else:
        loss = report.get("train_loss")
    return float(loss) if isinstance(loss, (int, float)) else None
