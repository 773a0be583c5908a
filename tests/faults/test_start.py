"""Clusters that do not meet, or do not train the same thing: one sentence, at once, on both sides."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Job, Stage, nothing_left

pytestmark = [pytest.mark.mpi, pytest.mark.netns, pytest.mark.timeout(90, func_only=True)]


def last_line(job: Job) -> str:
    return job.lines()[-1]


def test_a_job_that_was_not_started_has_no_processes(tmp_path: Path) -> None:
    """What a case leaves is killed; session 0 is that of others: kernel threads, whatever has entered a container."""
    assert Job("east", 0, tmp_path, "mark", lambda: 0).family() == []


def test_the_other_is_not_started(stage: Stage, tmp_path: Path, book: Book) -> None:
    """The first cluster waits at its door for the second; the second looks for the first one's door."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with (
        stage.jobs(tmp_path / "1", "--timeout", "5", east=None) as (west, _),
        stage.jobs(tmp_path / "2", "--timeout", "5", west=None) as (_, east),
    ):
        began = time.time()
        assert west.wait(30) == 1
        assert east.wait(30) == 1
        seconds = max(west.last_word_at(), east.last_word_at()) - began
        assert 4 < seconds < 20
        assert "NebulaError: cluster 'west' waited 5 s (sync_timeout_s) at the door '10.77.0.2:" in last_line(west)
        assert "for 'east', which never knocked" in last_line(west)
        assert "NebulaError: cluster 'east' looked for cluster 'west' at rendezvous='10.77.0.2:" in last_line(east)
        nothing_left(west)
        nothing_left(east)
        book.note("only one cluster started", seconds=seconds, limit_s=5, outcome="exits with 1, says who and where")


@pytest.mark.parametrize(
    ("east", "words"),
    [
        (
            ("--learning-rate", "0.02"),
            "cluster 'west' has learning_rate=0.01 but cluster 'east' has learning_rate=0.02",
        ),
        (("--width", "48"), "cluster 'west' has selection="),
        (("--codec", "bf16"), "cluster 'west' has sync_codec='fp32' but cluster 'east' has sync_codec='bf16'"),
        (("--steps", "31"), "all clusters must have the same max_steps, got {'west': 30, 'east': 31}"),
    ],
    ids=["learning rate", "shape", "codec", "max_steps"],
)
def test_mismatch(stage: Stage, tmp_path: Path, book: Book, east: tuple[str, ...], words: str) -> None:
    began = time.time()
    with stage.jobs(tmp_path, east=east) as jobs:
        for job in jobs:
            assert job.wait(30) == 1, job.tail()
            assert "HandshakeError" in last_line(job), job.tail()
            assert words in last_line(job)
        seconds = max(job.last_word_at() for job in jobs) - began
        assert seconds < 25
        assert last_line(jobs[0]) == last_line(jobs[1])
        nothing_left(*jobs)
        book.note(
            f"different {east[0][2:]}, from the start",
            seconds=seconds,
            limit_s=10,
            outcome="both exit with 1, same sentence",
        )
