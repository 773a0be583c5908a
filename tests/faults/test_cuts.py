"""The link is cut: a short cut costs its own length and nothing else, a long one parts the clusters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Stage, all_end_together, nothing_left
from tests.support.wan import WideArea

pytestmark = [pytest.mark.mpi, pytest.mark.netns]


@pytest.fixture(autouse=True)
def mended(wan: WideArea) -> object:
    """Whatever happens, the next test finds the link whole."""
    yield
    wan.restore()


@pytest.mark.timeout(90, func_only=True)
def test_two_seconds(stage: Stage, wan: WideArea, tmp_path: Path, book: Book) -> None:
    steps = 30
    with stage.jobs(tmp_path, "--steps", str(steps), "--workers", "1") as (west, east):
        west.reach(8)
        wan.cut()
        began = time.monotonic()
        time.sleep(0.3)  # a step that was on its way has ended
        stopped_at = west.step()
        time.sleep(1.7)
        assert west.step() <= stopped_at + 1
        wan.restore()
        west.reach(stopped_at + 2)
        pause_s = time.monotonic() - began
        for job in (west, east):
            assert job.finished(steps)
            report = job.report()
            assert report["degradations"] == []
            assert report["members"] == ["west", "east"]
            assert report["rounds"] == steps
        assert west.report()["parameter_digest"] == east.report()["parameter_digest"]
        nothing_left(west, east)
        book.note(
            "2 s cut of the link", seconds=None, limit_s=None, outcome=f"both go on together after {pause_s:.1f} s"
        )


@pytest.mark.slow
@pytest.mark.timeout(200, func_only=True)
def test_sixty_seconds(stage: Stage, wan: WideArea, tmp_path: Path, book: Book) -> None:
    """Both go on alone, and come together again once the link is whole."""
    steps = 750  # at 0.1 s they outlast the cut and the return
    with stage.jobs(tmp_path, "--steps", str(steps), "--timeout", "10") as jobs:
        jobs[0].reach(8)
        wan.cut()
        began = time.time()
        told = [job.parted_after(other, began) for job, other in (jobs, jobs[::-1])]
        assert all(7 < seconds < 20 for seconds in told)
        time.sleep(max(0.0, began + 60 - time.time()))
        assert not any(job.find("is back at exchange") for job in jobs)
        wan.restore()
        all_end_together(*jobs, steps=steps)
        book.note("60 s cut of the link", seconds=max(told), limit_s=10, outcome="both go on alone, then together")
