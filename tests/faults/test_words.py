"""A cluster that fails, is interrupted or is terminated tells the other one why."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Job, Stage, nothing_left, until

pytestmark = [pytest.mark.mpi, pytest.mark.netns, pytest.mark.timeout(90, func_only=True)]
STEPS = 20


def began_at(job: Job, step: int) -> float:
    """When a job finished a step, in seconds since the epoch."""
    found = until(lambda: job.find(rf"^step {step} at"), 30, f"{job.cluster}: step {step}")
    return float(found.split()[-1])


def hears(stage: Stage, folder: Path, book: Book, fault: str, words: str, code: int, *trainer: str) -> None:
    """East goes wrong at step 8; west must hear ``words`` and go on."""
    arguments = ("--steps", str(STEPS), *trainer)
    with stage.jobs(folder, *arguments, east=("--fault", f"{fault}@8")) as (west, east):
        assert east.wait(40) == code, east.tail()
        assert west.finished(STEPS)
        nothing_left(west, east)
        sentence = f"cluster 'east' was lost after exchange 8: {words}"
        assert any(entry.startswith(sentence) for entry in west.report()["degradations"]), west.report()["degradations"]
        told = west.told_at("nebula: " + re.escape(sentence))
        assert told is not None
        seconds = told - began_at(east, 8)
        assert seconds < 5.0  # of 10 s of silence
        assert east.report()["status"] == "failed"
        assert east.report()["failure"].startswith(words)
        what = {"raise": "an exception", "nan": "a NaN loss", "exit": "sys.exit()"}.get(fault, fault)
        how = " (callback only)" if trainer else ""
        book.note(f"{what} in east{how}", seconds=seconds, limit_s=2, outcome="goes on alone")


@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        ("raise", "it failed with KeyError: 'no such column: labels'", 1),
        ("nan", "it failed with ValueError: PaddleRecall error(102): LossNan", 1),
        ("SIGINT", "it was interrupted (Ctrl-C)", -signal.SIGINT),
        ("SIGTERM", "it was terminated (SIGTERM)", 128 + signal.SIGTERM),
    ],
)
def test_words(stage: Stage, tmp_path: Path, book: Book, fault: str, words: str, code: int) -> None:
    hears(stage, tmp_path, book, fault, words, code)


@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        ("raise", "it failed with KeyError: 'no such column: labels'", 1),
        ("SIGTERM", "it was terminated (SIGTERM)", 128 + signal.SIGTERM),
        ("exit", "its process ended before its training did", 7),
    ],
)
def test_words_with_the_callback_only(
    stage: Stage, tmp_path: Path, book: Book, fault: str, words: str, code: int
) -> None:
    hears(stage, tmp_path, book, fault, words, code, "--trainer", "plain")


def test_stop_on_the_others_exception(stage: Stage, tmp_path: Path) -> None:
    with stage.jobs(tmp_path, "--on-loss", "stop", east=("--fault", "raise@5")) as (west, east):
        assert east.wait(40) == 1
        assert west.wait(30) == 1
        last = west.lines()[-1]
        assert last.startswith("paddlenlp_nebula.errors.PeerLost: cluster 'east' is gone: it failed with KeyError"), (
            last
        )
        nothing_left(west, east)


def test_a_checkpoint_is_written_when_asked_to_end(stage: Stage, tmp_path: Path) -> None:
    arguments = ("--steps", str(STEPS), "--save", "steps")
    with stage.jobs(tmp_path, *arguments, east=("--fault", "SIGTERM@8")) as (west, east):
        assert east.wait(40) == 128 + signal.SIGTERM, east.tail()
        assert west.finished(STEPS)
        nothing_left(west, east)
        assert east.step() == 9  # one more than when it was asked
        assert (east.folder / "out" / "checkpoint-9" / "trainer_state.json").is_file()
        assert east.find("it was terminated .SIGTERM.: checkpoint-9 is written")
        (sentence, *_) = west.report()["degradations"]
        assert sentence.startswith("cluster 'east' was lost after exchange 9: it was terminated (SIGTERM)")
