"""A process that is stopped says nothing, and its connections stay open: the deadline finds it out."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Stage, all_end_together, nothing_left

pytestmark = [pytest.mark.mpi, pytest.mark.netns, pytest.mark.slow]
TIMEOUT_S = 10


@pytest.mark.timeout(120, func_only=True)
def test_stopped_trainer(stage: Stage, tmp_path: Path, book: Book) -> None:
    """The other goes on alone; the stopped one, continued, learns that and does the same."""
    with stage.jobs(tmp_path, "--steps", "30", "--timeout", str(TIMEOUT_S)) as (west, east):
        west.reach(8)
        east.process("trainer").send_signal(signal.SIGSTOP)
        seconds = west.parted_after(east, time.time())
        assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + 10
        assert west.finished(30)
        assert "it has given no sign of life for" in west.report()["degradations"][0]
        east.process("trainer").send_signal(signal.SIGCONT)
        assert east.finished(30)
        assert "cluster 'west' was lost" in east.report()["degradations"][0]
        nothing_left(west, east)
        book.note("SIGSTOP of the trainer", seconds=seconds, limit_s=TIMEOUT_S, outcome="goes on alone")


@pytest.mark.timeout(120, func_only=True)
def test_stopped_courier(stage: Stage, tmp_path: Path, book: Book) -> None:
    """Both lose each other, though their trainers live; new couriers bring them together again."""
    steps = 100
    with stage.jobs(tmp_path, "--steps", str(steps), "--timeout", str(TIMEOUT_S)) as jobs:
        west, east = jobs
        west.reach(8)
        east.process("courier").send_signal(signal.SIGSTOP)
        began = time.time()
        told = [job.parted_after(other, began) for job, other in (jobs, jobs[::-1])]
        assert all(TIMEOUT_S - 1 < seconds < TIMEOUT_S + 10 for seconds in told)
        all_end_together(*jobs, steps=steps)
        book.note("SIGSTOP of the courier", seconds=max(told), limit_s=TIMEOUT_S, outcome="both go on, soon together")


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize("what", ["courier", "mpiexec"])
def test_stopped_at_the_end(stage: Stage, tmp_path: Path, book: Book, what: str) -> None:
    """After the last step: mpiexec is not missed, and neither keeps its trainer from ending."""
    with stage.jobs(tmp_path, "--steps", "20", "--timeout", str(TIMEOUT_S)) as (west, east):
        east.reach(8 if what == "mpiexec" else 20)
        east.process(what).send_signal(signal.SIGSTOP)
        for job in (west, east):
            assert job.finished(20, within_s=40)
        losses = [sentence for job in (west, east) for sentence in job.report()["degradations"]]
        assert not losses or what == "courier"
        nothing_left(west, east)
        if what == "mpiexec":
            book.note("SIGSTOP of mpiexec", seconds=None, limit_s=None, outcome="nothing happens")


@pytest.mark.timeout(240, func_only=True)
def test_stall_of_a_cluster_whose_peer_has_two_processes(stage: Stage, tmp_path: Path, book: Book) -> None:
    """West stalls for 45 s: longer than gloo lets east's second process wait in a collective."""
    both = ("--steps", "12", "--timeout", "120")
    with stage.jobs(tmp_path, *both, west=("--fault", "stall45@6"), east=("--processes", "2")) as (west, east):
        assert west.finished(12, within_s=200)
        assert east.wait(60) == 0, east.tail()
        assert west.report()["degradations"] == east.report()["degradations"] == []
        assert west.report()["rounds"] == east.report()["rounds"] == 12
        assert east.find("the script has ended")
        nothing_left(west, east)
        book.note("45 s stall, the other has 2 processes", seconds=None, limit_s=None, outcome="waits, then goes on")
