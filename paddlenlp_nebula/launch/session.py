"""``nebula run`` from Python: a recipe on clusters of this machine, in the background of a notebook or a script.

    with start_recipe("finetune_lora", local_clusters=2, max_steps=30) as run:
        run.watch()

The clusters are not children of the notebook but of a ``nebula run`` command, which is: it checks, supervises and
ends them as it does in a terminal, needs no signal handler or thread of ours, and ends with the notebook.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.launch.family import die_with_parent
from paddlenlp_nebula.launch.reports import RESULT_NAME, read_report
from paddlenlp_nebula.launch.roster import local_roster
from paddlenlp_nebula.launch.summary import summary_table
from paddlenlp_nebula.recipe.source import find_recipe, read_overrides, read_recipe

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LocalRun", "start_recipe"]

_LOG_NAME = "nebula_run.log"
_TAIL_LINES = 20
# `nebula run` gets more pressing by itself, grace_s by grace_s; this is for one that hangs.
_PATIENCE = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
_OF_THE_KERNEL = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "MPLBACKEND")  # Jupyter sets them for its cells alone


def start_recipe(
    recipe: str | Path,
    *,
    local_clusters: int | None = None,
    clusters: Sequence[str] = (),
    processes_per_cluster: int = 1,
    grace_s: float = 3.0,
    **overrides: object,
) -> LocalRun:
    """Start ``nebula run`` in the background; returns at once.

    Args:
        recipe: a flat YAML or JSON file, or the name of a shipped one.
        local_clusters: how many clusters; by default as many as ``clusters`` names, or two.
        clusters: their names; by default west, east, north, ...
        processes_per_cluster: data-parallel processes in each.
        grace_s: when stopped, how long they have to end by themselves before SIGTERM, and again before SIGKILL.
        **overrides: any key of the recipe, such as ``max_steps=30``; None unsets it.

    Raises:
        ConfigurationError: there is no such recipe, it names no ``output_dir``, or the clusters make no sense.
            What else is wrong is found by the command; ``wait`` and ``watch`` raise it.
        NebulaError: another run is writing to the same ``output_dir``.

    Linux ends the run together with the thread that calls this, not only with the process: call it from one that lives
    as long as the run should (in a notebook, any cell).
    """
    path = find_recipe(str(recipe)).resolve()
    words = _override_words(overrides)
    if local_clusters is None and not clusters:
        local_clusters = 2
    names = local_roster(local_clusters, ",".join(clusters) or None).names
    output_dir = read_recipe(path).overridden_by(read_overrides(words)).settings.get("output_dir")
    if output_dir is None or not isinstance(output_dir.value, str):
        raise ConfigurationError([f"output_dir must be set, in {path.name} or as output_dir=..., got neither"])
    folder = Path(output_dir.value).expanduser().resolve()
    command = [
        *(sys.executable, "-m", "paddlenlp_nebula.cli", "run", str(path)),
        *("--clusters", ",".join(names), "--grace-s", str(grace_s)),
        *("--processes-per-cluster", str(processes_per_cluster)),
        *words,
        *("--output_dir", str(folder)),
    ]
    return LocalRun(command, {name: folder / name for name in names}, folder, title=path.stem)


class LocalRun:
    """A run in the background, made by `start_recipe`. As a context manager it is stopped at the end of the block.

    Attributes:
        directories: cluster -> the folder it writes to.
        log: what ``nebula run`` has to say.
    """

    def __init__(self, command: Sequence[str], directories: Mapping[str, Path], folder: Path, *, title: str) -> None:
        self.directories = dict(directories)
        self.log = folder / _LOG_NAME
        self._title = title
        self._alone = folder / "alone"
        self._stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            _lock(log, folder)
            log.truncate(0)
            # By the clock of the file system, which need not be ours: all that is older is an earlier run's.
            self._started_ns = self.log.stat().st_mtime_ns
            self._process = subprocess.Popen(
                command,
                env={name: value for name, value in os.environ.items() if name not in _OF_THE_KERNEL},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Jupyter interrupts and kills a kernel's whole process group; the run shall end in good order instead.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped" if self._stopped else f"ended ({self._process.returncode})"
        return f"<{type(self).__name__} {self._title} on {', '.join(self.directories)}: {state}>"

    @property
    def running(self) -> bool:
        """Whether any process of it is left."""
        return self._process.poll() is None

    def reports(self) -> dict[str, dict[str, Any]]:
        """Each cluster's ``nebula_report.json`` as of now; empty for one that has not begun to train."""
        return {name: read_report(directory, since_ns=self._started_ns) for name, directory in self.directories.items()}

    def results(self) -> dict[str, dict[str, Any]]:
        """Each cluster's ``recipe_result.json``; empty for one that has not got so far."""
        return {
            name: read_report(directory, RESULT_NAME, since_ns=self._started_ns)
            for name, directory in self.directories.items()
        }

    def updates(self, every_s: float = 1.0) -> Iterator[dict[str, dict[str, Any]]]:
        """The reports whenever they have changed, and once more when the run has ended."""
        shown: dict[str, dict[str, Any]] = {name: {} for name in self.directories}
        while self.running:
            if (reports := self.reports()) != shown:
                shown = reports
                yield reports
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(every_s)
        yield self.reports()

    def watch(self, every_s: float = 1.0) -> None:
        """Plot the losses below the cell while the run trains; returns when it has ended.

        Interrupting the cell stops the run. Needs matplotlib and IPython, ``pip install ipykernel matplotlib``.

        Raises:
            NebulaError: the run failed; with what it said last.
        """
        with self:
            try:
                from paddlenlp_nebula.ledger.plots import LossPlot
            except ImportError as error:
                raise NebulaError(f"{error}: watching needs pip install ipykernel matplotlib") from None
            plot = LossPlot()
            for reports in self.updates(every_s):
                plot.show(reports)
            self.wait()

    def wait(self) -> None:
        """Return when the run has ended. An exception meanwhile, such as an interrupt, stops it.

        Raises:
            NebulaError: the run failed, and not because it was stopped; with what it said last.
        """
        try:
            code = self._process.wait()
        except BaseException:
            self.stop()
            raise
        if code and not self._stopped:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise NebulaError("\n".join([f"nebula run ended with exit code {code}; it said:", *lines[-_TAIL_LINES:]]))

    def stop(self) -> None:
        """End all clusters, politely first; returns when no process of the run is left.

        An interrupt meanwhile makes it less polite.
        """
        for number, patience_s in _PATIENCE:
            if not self.running:
                return
            self._stopped = True
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(patience_s)

    def table(self) -> Table:
        """The clusters side by side, as ``nebula run`` shows them at its end; a notebook displays it."""
        columns = {name: self.directories[name] for name, report in self.reports().items() if report}
        if read_report(self._alone, RESULT_NAME, since_ns=self._started_ns):
            columns["alone"] = self._alone
        return summary_table(columns, self._title)


def _lock(log: IO[bytes], folder: Path) -> None:
    """Hold the log as long as somebody has it open: the command that writes to it, that is, even after our end.

    A cell that starts a run is easily executed twice, and two runs in one folder destroy each other's files.
    """
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NebulaError(
            f"a run is still writing to {folder}: stop it first (run.stop()), or set another output_dir"
        ) from None


def _override_words(overrides: Mapping[str, object]) -> list[str]:
    """Keyword arguments as command line words.

    Example:
        >>> _override_words({"max_steps": 3, "lora": False, "report_to": ["visualdl"], "seed": None})
        ['--max_steps', '3', '--lora', 'false', '--report_to', 'visualdl', '--seed', 'null']
    """
    words = []
    for key, value in overrides.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{key}", *(_word(item) for item in values)]
    return words


def _word(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
