"""Two clusters' training jobs that faults are done to, and what is asked of them afterwards."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from paddlenlp_nebula.launch.roster import Roster
from paddlenlp_nebula.security.throwaway import throw_away
from tests.support.wan import Site, WideArea

__all__ = ["MARK", "ROOT", "Job", "Stage", "Zygote", "all_end_together", "marked", "nothing_left", "until"]

ROOT = Path(__file__).parents[2]
MARK = "NEBULA_TEST_CASE"  # in the environment of whatever a job starts
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Real TCP also where both sites are this machine: MPI would take shared memory, which fails in other ways.
_TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}

Start: TypeAlias = tuple[int, Callable[[], "int | None"]]
"""A process id, and what tells its exit code."""


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """The condition's value as soon as it is true; an AssertionError if it is not in time."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)
    return value


class Zygote:
    """The process that all trainers are forked from.

    Args:
        trainee: the module whose ``main(argv)`` a trainer is.
    """

    def __init__(self, trainee: str = "tests.faults.trainee") -> None:
        environment = {**os.environ, **_TCP, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._news = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self.ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", trainee],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        until(lambda: self.ready or self._process.poll() is not None, 300, "the imports")
        assert self.ready, f"{trainee} cannot be imported"

    def fork(self, argv: Sequence[str], env: Mapping[str, str], folder: Path, site: Site | None) -> int:
        """Start a trainer; returns its process id."""
        assert self._process.stdin is not None
        with self._news:
            before = len(self._started)
            place = site.place if site else None
            order = {"argv": list(argv), "env": dict(env), "folder": str(folder), "site": place}
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._started) > before, 30), "the zygote does not answer"
            return self._started[-1]

    def code(self, pid: int) -> int | None:
        """A trainer's exit code (negative: the signal), or None while it runs."""
        with self._news:
            return self._codes.get(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # something that an import had to say
                answer = json.loads(line)
                with self._news:
                    self.ready = True
                    if "started" in answer:
                        self._started.append(answer["started"])
                    elif "ended" in answer:
                        self._codes[answer["ended"]] = answer["code"]
                    self._news.notify_all()


class Job:
    """One cluster's training.

    Attributes:
        cluster: its name.
        pid: its trainer (the launcher, if there are several); 0 where none was started.
        folder: where it runs; holds ``log`` and ``out/``.
        mark: in the environment of all processes of the case.
        code: its exit code (negative: the signal), or None while it runs.
    """

    def __init__(self, cluster: str, pid: int, folder: Path, mark: str, code: Callable[[], int | None]) -> None:
        self.cluster = cluster
        self.pid = pid
        self.folder = folder
        self.mark = mark
        self.code = code

    def lines(self) -> list[str]:
        """Its log so far."""
        logs = [self.folder / "log", *sorted(self.folder.glob("logs/workerlog.*"))]
        text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        return _COLOUR.sub("", text).splitlines()

    def find(self, pattern: str) -> str | None:
        """The first line of its log that matches."""
        return next((line for line in self.lines() if re.search(pattern, line)), None)

    def told_at(self, pattern: str) -> float | None:
        """When it logged the first line that matches, in seconds since the epoch."""
        line = self.find(pattern)
        stamp = _STAMP.search(line or "")
        if stamp is None:
            return None
        return datetime.datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000

    def parted_after(self, other: Job, since: float, within_s: float = 40.0) -> float:
        """How long after ``since`` it logs that it has lost the other one, seconds; waited for."""
        pattern = f"nebula: cluster '{other.cluster}' was lost"
        return float(until(lambda: self.told_at(pattern), within_s, f"{self.cluster} logs the loss")) - since

    def back_after(self, since: float, within_s: float = 60.0) -> float:
        """How long after ``since`` it logs that somebody is back, seconds; waited for."""
        pattern = r"nebula: cluster '\w+' is back at exchange"
        return (
            float(until(lambda: self.told_at(pattern), within_s, f"{self.cluster} logs the return:\n{self.tail()}"))
            - since
        )

    def last_word_at(self) -> float:
        """When it last wrote to its log; with Paddle loaded, an interpreter takes seconds more to end."""
        return (self.folder / "log").stat().st_mtime

    def step(self) -> int:
        """The last step it has taken."""
        steps = [int(found[1]) for line in self.lines() if (found := re.match(r"step (\d+) at", line))]
        return steps[-1] if steps else 0

    def reach(self, step: int, within_s: float = 30.0) -> None:
        """Wait until it has taken a step."""
        until(lambda: self.step() >= step or self.code() is not None, within_s, f"{self.cluster}: step {step}")
        assert self.step() >= step, f"{self.cluster} ended at step {self.step()}:\n" + self.tail()

    def wait(self, within_s: float) -> int:
        """Its exit code."""
        until(lambda: self.code() is not None, within_s, f"the end of {self.cluster}, at step {self.step()}")
        code = self.code()
        assert code is not None
        return code

    def finished(self, steps: int, within_s: float = 30.0) -> bool:
        """Whether it ends as it should, all its steps taken."""
        assert self.wait(within_s) == 0, f"{self.cluster} failed:\n" + self.tail()
        return self.step() == steps and self.find("the script has ended") is not None

    def report(self) -> dict[str, Any]:
        """Its nebula_report.json."""
        found: dict[str, Any] = json.loads((self.folder / "out" / "nebula_report.json").read_text())
        return found

    def family(self) -> list[psutil.Process]:
        """All its living processes."""
        if self.pid == 0:  # also the session that Linux shows for processes from outside of a container
            return []
        forked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    forked.append(process)
        return forked + marked(self.mark, self.cluster)

    def tail(self, count: int = 25) -> str:
        return "\n".join(self.lines()[-count:])

    def process(self, what: str) -> psutil.Process:
        """Its ``trainer``, ``courier`` or ``mpiexec``."""
        if what == "trainer":
            return psutil.Process(self.pid)
        for process in marked(self.mark, self.cluster):
            is_mpiexec = "mpiexec" in process.name()
            if is_mpiexec == (what == "mpiexec") and "courier_process" in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"{self.cluster} has no {what}: {marked(self.mark, self.cluster)}")


def marked(mark: str, cluster: str | None = None) -> list[psutil.Process]:
    """The living processes that the jobs of a case (or one of them) have started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            mine = environment.get(MARK) == mark and cluster in (None, environment.get("NEBULA_CLUSTER"))
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Stage:
    """Two sites on which jobs are run.

    Args:
        zygote: starts the trainers.
        wan: the network between the sites; None: both are this machine, as it is.
    """

    def __init__(self, zygote: Zygote, wan: WideArea | None) -> None:
        self.wan = wan
        self._zygote = zygote
        self._port = 47000
        self._starts: dict[tuple[str, str], Callable[[], Start]] = {}

    def again(self, job: Job) -> None:
        """Start a job that has ended once more, with the same command in the same folder."""
        assert job.code() is not None
        job.pid, job.code = self._starts[job.mark, job.cluster]()

    @contextmanager
    def jobs(
        self, folder: Path, *both: str, west: Sequence[str] | None = (), east: Sequence[str] | None = ()
    ) -> Iterator[tuple[Job, Job]]:
        """Start both jobs (or, with None, not that one) and end whatever is left of them afterwards.

        Args:
            folder: an empty one.
            both: arguments of both trainers, see ``trainee.py``.
            west, east: further ones of one.
        """
        mark = uuid.uuid4().hex
        roster = Roster(("west", "east"), self._rendezvous(), certificates=folder / "keys")
        (folder / "keys").mkdir()
        throw_away(roster.names, folder / "keys")
        jobs = []
        try:
            for name, own in (("west", west), ("east", east)):
                place = folder / name
                place.mkdir()
                environment = {MARK: mark, **roster.environment(name)}
                start = partial(self._start, name, own, both, environment, place)
                pid, code = start()
                jobs.append(Job(name, pid, place, mark, code))
                self._starts[mark, name] = start
            yield jobs[0], jobs[1]
        finally:
            for process in [process for job in jobs for process in job.family()]:
                with suppress(psutil.Error):
                    process.kill()

    def _start(
        self,
        name: str,
        own: Sequence[str] | None,
        both: Sequence[str],
        environment: Mapping[str, str],
        place: Path,
    ) -> Start:
        if own is None:
            return 0, lambda: 0
        if tuple(own[:1]) == ("--processes",):
            return self._launch(name, int(own[1]), [*both, *own[2:]], environment, place)
        pid = self._zygote.fork([*both, *own], environment, place, self.wan[name] if self.wan else None)
        return pid, lambda: self._zygote.code(pid)

    def _launch(self, name: str, count: int, argv: Sequence[str], environment: Mapping[str, str], place: Path) -> Start:
        """A cluster of several local processes, under Paddle's launcher."""
        launcher = ["paddle.distributed.launch", "--nproc_per_node", str(count), "--log_dir", "logs"]
        command = [sys.executable, "-m", *launcher, str(ROOT / "tests/faults/trainee.py"), *argv]
        with (place / "log").open("ab") as log:
            process = subprocess.Popen(
                self.wan[name].command(command) if self.wan else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=place,
                env={**os.environ, **_TCP, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return process.pid, process.poll

    def _rendezvous(self) -> str:
        if self.wan is not None:
            self._port += 1
            return f"{self.wan['west'].address}:{self._port}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"127.0.0.1:{free.getsockname()[1]}"


def all_end_together(*jobs: Job, steps: int, newcomer: str | None = None) -> None:
    """Assert that jobs that have parted once end with the same parameters, and that both reports tell of the return.

    Args:
        jobs: all jobs of the case.
        steps: that they end with.
        newcomer: the cluster that comes back, if that is known.
    """
    for job in jobs:
        assert job.finished(steps, within_s=120)
    reports = [job.report() for job in jobs]
    names = [job.cluster for job in jobs]
    assert [report["members"] for report in reports] == [names] * len(jobs)
    assert [report["status"] for report in reports] == ["done"] * len(jobs)
    assert len({report["parameter_digest"] for report in reports}) == 1
    for job, report in zip(jobs, reports, strict=True):
        returned = [event for event in report["events"] if event["what"] == "returned"]
        assert len(returned) == 1, (job.cluster, report["events"])
        assert newcomer in (None, returned[0]["cluster"])
        assert sum("is back at exchange" in sentence for sentence in report["degradations"]) == 1
    nothing_left(*jobs)


def nothing_left(*jobs: Job, killed: bool = False, within_s: float = 5.0) -> None:
    """Assert that the jobs, which have ended, left no process behind: no courier, no mpiexec, no data worker.

    Args:
        jobs: all jobs of the case.
        killed: a trainer was killed; then its data workers do not count, because Paddle's never look for their
            parent (``indices_queue.get(5.0)`` takes the seconds for its ``block``), with or without us.
        within_s: how long that may take.
    """

    def left() -> list[psutil.Process]:
        return marked(jobs[0].mark) if killed else [process for job in jobs for process in job.family()]

    until(lambda: not left(), within_s, "the end of what the jobs left")
