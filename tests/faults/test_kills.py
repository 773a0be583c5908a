"""SIGKILL of each process of a cluster: the other one says so at once and goes on, or stops when told to."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Job, Stage, nothing_left, until

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90, func_only=True)]
STEPS = 25
AT_ONCE_S = 5.0  # a second on an idle machine, and less than the 10 s of silence after which anything is noticed
_LOST = r"nebula: cluster '?{}'? (is gone|was lost)"


def seconds_until_told(job: Job, other: Job, since: float) -> float:
    """How long after ``since`` a job's log first says that the other is lost."""
    pattern = _LOST.format(other.cluster)
    told = until(lambda: job.told_at(pattern), AT_ONCE_S + 10, f"{job.cluster} logs the loss of {other.cluster}")
    return float(told) - since


def strike(stage: Stage, folder: Path, book: Book, victim: str, at: str, place: str = "") -> None:
    # A data worker, forked after the clusters have met, inherits the leader's sockets.
    with stage.jobs(folder, "--steps", str(STEPS), "--workers", "1") as jobs:
        hurt, other = jobs if at == "west" else jobs[::-1]
        hurt.reach(8)
        other.reach(8)
        began = time.time()
        hurt.process(victim).send_signal(signal.SIGKILL)
        seconds = seconds_until_told(other, hurt, began)
        assert seconds < AT_ONCE_S
        assert other.finished(STEPS)
        assert any(f"{hurt.cluster!r} was lost" in sentence for sentence in other.report()["degradations"])
        if victim == "trainer":
            assert hurt.wait(30) == -signal.SIGKILL
        else:  # only the link is gone: both go on alone
            assert seconds_until_told(hurt, other, began) < AT_ONCE_S
            assert hurt.finished(STEPS)
            assert any(f"{other.cluster!r} was lost" in sentence for sentence in hurt.report()["degradations"])
        nothing_left(*jobs, killed=victim == "trainer")
        book.note(f"SIGKILL of the {victim} of {at}{place}", seconds=seconds, limit_s=1, outcome="goes on alone")


@pytest.mark.netns
@pytest.mark.parametrize(
    ("victim", "at"), [("trainer", "west"), ("trainer", "east"), ("courier", "west"), ("mpiexec", "east")]
)
def test_kill(stage: Stage, tmp_path: Path, book: Book, victim: str, at: str) -> None:
    strike(stage, tmp_path, book, victim, at)


@pytest.mark.parametrize(("victim", "at"), [("trainer", "west"), ("courier", "east")])
def test_kill_on_one_machine(one_machine: Stage, tmp_path: Path, book: Book, victim: str, at: str) -> None:
    strike(one_machine, tmp_path, book, victim, at, ", one machine")


@pytest.mark.netns
def test_kill_with_on_loss_stop(stage: Stage, tmp_path: Path, book: Book) -> None:
    with stage.jobs(tmp_path, "--steps", str(STEPS), "--on-loss", "stop") as (west, east):
        west.reach(8)
        began = time.time()
        east.process("trainer").send_signal(signal.SIGKILL)
        assert west.wait(30) == 1
        assert west.lines()[-1].startswith(
            "paddlenlp_nebula.errors.PeerLost: cluster 'east' is gone: its process ended"
        )
        assert west.report()["status"] == "failed"
        assert any("'east' was lost" in sentence for sentence in west.report()["degradations"])
        nothing_left(west, east)
        seconds = seconds_until_told(west, east, began)
        assert seconds < AT_ONCE_S
        book.note(
            "SIGKILL of the trainer of east, sync_on_loss=stop", seconds=seconds, limit_s=1, outcome="exits with 1"
        )
