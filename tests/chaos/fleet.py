"""The clusters of a chaos run, kept alive as a scheduler would keep them, and watched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from paddlenlp_nebula.launch.roster import Roster
from paddlenlp_nebula.security.throwaway import throw_away
from tests.faults.jobs import MARK, Job, Zygote, marked
from tests.support.wan import WideArea

__all__ = ["Cluster", "Fleet", "Hang"]

_CRASHES = 5  # of one cluster: then it is beyond help
_RESTART_S = 1.0  # after a crash


class Hang(AssertionError):
    """A cluster has not taken a step for too long, or ends again and again."""


class Cluster:
    """One of them.

    Attributes:
        name: its name.
        folder: where it runs.
        crashes: how often, and how, it has ended although nobody killed it.
        step: where its training is.
        taken: steps that its process has taken itself.
        job: its process, or None while it waits for the scheduler.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.crashes: list[str] = []
        self.job: Job | None = None
        self.starts = 0
        self.restart_at: float | None = None
        self.away_s: float | None = None  # how long the scheduler takes; set by who kills it
        self.step = self.taken = 0
        self.moved_at = time.monotonic()
        self.began_at: float | None = None  # its first step

    @property
    def done(self) -> bool:
        """Its training is complete."""
        return self.job is not None and self.job.code() == 0

    def look(self) -> None:
        """See how far it is."""
        with suppress(FileNotFoundError, ValueError):
            progress = json.loads((self.folder / "progress").read_text())
            if progress["step"] != self.step:
                self.step, self.taken, self.moved_at = progress["step"], progress["taken"], time.monotonic()
                self.began_at = self.began_at or self.moved_at

    def couriers(self) -> list[psutil.Process]:
        """Its living couriers, in the order of their birth."""
        assert self.job is not None
        found = [process for process in marked(self.job.mark, self.name) if is_courier(process)]
        return sorted(found, key=lambda process: process.create_time())


class Fleet:
    """Clusters that train together, each at a site of its own; a context manager that starts and ends them.

    Args:
        wan: the sites.
        zygote: starts the trainers.
        folder: an empty one.
        argv: the trainers' arguments, see ``trainee.py``.
        rendezvous: where they meet.
        patience_s: how long a cluster may take no step.
    """

    def __init__(
        self, wan: WideArea, zygote: Zygote, folder: Path, argv: Sequence[str], rendezvous: str, patience_s: float
    ) -> None:
        self.clusters = {site.name: Cluster(site.name, folder / site.name) for site in wan.sites}
        self._wan = wan
        self._zygote = zygote
        self._argv = list(argv)
        self._patience_s = patience_s
        self._excused_until = 0.0
        self._mark = uuid.uuid4().hex
        self._roster = Roster(tuple(self.clusters), rendezvous, certificates=folder / "keys")
        (folder / "keys").mkdir(parents=True)
        throw_away(self._roster.names, folder / "keys")

    def __enter__(self) -> Fleet:
        for cluster in self.clusters.values():
            cluster.folder.mkdir()
            self._start(cluster)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in [cluster.job for cluster in self.clusters.values() if cluster.job is not None]:
            for process in job.family():
                with suppress(psutil.Error):
                    process.kill()

    @property
    def step(self) -> int:
        """That of the furthest cluster."""
        return max(cluster.step for cluster in self.clusters.values())

    @property
    def training_s(self) -> float:
        """From everybody's first step to the last one of all."""
        clusters = self.clusters.values()
        return max(c.moved_at for c in clusters) - max(c.began_at or c.moved_at for c in clusters)

    @property
    def done(self) -> bool:
        """Everybody's training is complete."""
        return all(cluster.done for cluster in self.clusters.values())

    def tend(self) -> None:
        """Look after everybody: restart who has died, and see who hangs.

        Raises:
            Hang: a cluster takes no step any more; says which, with everybody's stacks in its folder.
        """
        for cluster in self.clusters.values():
            cluster.look()
            now = time.monotonic()
            if cluster.job is None:
                if cluster.restart_at is not None and now >= cluster.restart_at:
                    self._start(cluster)
                continue
            code = cluster.job.code()
            if code is None:
                if now - max(cluster.moved_at, self._excused_until) > self._patience_s:
                    raise Hang(f"{cluster.name} has taken no step for {self._patience_s:g} s\n" + self.stacks())
            elif code != 0:
                self._bury(cluster, code)

    def excuse(self) -> None:
        """What has held a cluster up so far does not count as its hanging."""
        self._excused_until = time.monotonic()

    def kill(self, name: str, away_s: float) -> None:
        """SIGKILL a trainer; the scheduler starts it again after ``away_s``."""
        cluster = self.clusters[name]
        assert cluster.job is not None
        cluster.away_s = away_s
        os.kill(cluster.job.pid, signal.SIGKILL)

    def stacks(self) -> str:
        """Where every process of the run is; the trainers' threads by faulthandler, the others by their state."""
        said = []
        for cluster in self.clusters.values():
            said.append(f"== {cluster.name}, step {cluster.step}, {'alive' if cluster.job else 'not started'}")
            if cluster.job is None or cluster.job.code() is not None:
                continue
            os.kill(cluster.job.pid, signal.SIGCONT)
            os.kill(cluster.job.pid, signal.SIGUSR1)
            time.sleep(0.5)
            said.append(
                (cluster.folder / "stacks").read_text() if (cluster.folder / "stacks").exists() else "no stacks"
            )
            for process in cluster.job.family():
                with suppress(psutil.Error, OSError):
                    place = Path(f"/proc/{process.pid}/wchan").read_text()
                    said.append(f"{process.pid} {process.name()} {process.status()} in {place or '?'}")
            said.append(cluster.job.tail(40))
        return "\n".join(said)

    def _start(self, cluster: Cluster) -> None:
        for name in ("progress", "final.json"):
            (cluster.folder / name).unlink(missing_ok=True)
        environment = {MARK: self._mark, **self._roster.environment(cluster.name)}
        pid = self._zygote.fork(self._argv, environment, cluster.folder, self._wan[cluster.name])
        cluster.job = Job(cluster.name, pid, cluster.folder, self._mark, lambda: self._zygote.code(pid))
        cluster.starts += 1
        cluster.restart_at = cluster.away_s = None
        cluster.moved_at = time.monotonic()

    def _bury(self, cluster: Cluster, code: int) -> None:
        """A trainer has ended before its training did."""
        assert cluster.job is not None
        report = cluster.folder / "out" / "nebula_report.json"
        if report.exists():
            shutil.copy(report, cluster.folder / f"report-{cluster.starts}.json")
        if cluster.away_s is None:
            cluster.crashes.append(f"step {cluster.step}: exit code {code}: {cluster.job.lines()[-1]}")
            if len(cluster.crashes) > _CRASHES:
                raise Hang(f"{cluster.name} ends again and again: {cluster.crashes}")
        cluster.job = None
        cluster.restart_at = time.monotonic() + (_RESTART_S if cluster.away_s is None else cluster.away_s)


def is_courier(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "mpiexec" not in process.name() and "courier_process" in " ".join(process.cmdline())
    return False
