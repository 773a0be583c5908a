"""What was lost comes back: a courier, a trainer, the first cluster, a machine that stood still, a link that was cut."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Stage, all_end_together, nothing_left, until
from tests.support.wan import WideArea

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180, func_only=True)]
STEPS = 250  # at 0.1 s they outlast every return
TOGETHER = ["west", "east"]


@pytest.mark.parametrize("at", ["east", pytest.param("west", marks=pytest.mark.slow)])
def test_courier_killed(one_machine: Stage, tmp_path: Path, book: Book, at: str) -> None:
    with one_machine.jobs(tmp_path, "--steps", str(STEPS)) as jobs:
        hurt = jobs[at == "east"]
        hurt.reach(8)
        began = time.time()
        hurt.process("courier").send_signal(signal.SIGKILL)
        seconds = max(job.back_after(began) for job in jobs)
        all_end_together(*jobs, steps=STEPS)
        book.note(f"SIGKILL of the courier of {at}: return", seconds=seconds, limit_s=None, outcome="together again")


@pytest.mark.parametrize("strategy", [("local_steps", "--every", "5"), ("every_step",)])
def test_lost_with_the_last_steps(one_machine: Stage, tmp_path: Path, strategy: tuple[str, ...]) -> None:
    """A return takes longer than what is left of the training: who is done waits for the other one."""
    with one_machine.jobs(tmp_path, "--steps", "60", "--strategy", *strategy) as jobs:
        jobs[0].reach(56)
        jobs[1].process("courier").send_signal(signal.SIGKILL)
        for job in jobs:
            assert job.finished(60, within_s=60)
        reports = [job.report() for job in jobs]
        assert [report["members"] for report in reports] == [TOGETHER, TOGETHER]
        assert reports[0]["parameter_digest"] == reports[1]["parameter_digest"]
        for report in reports:
            assert [event["what"] for event in report["events"]] == ["lost", "returned"]
            assert "training ends without" not in str(report["degradations"])
        nothing_left(*jobs)


@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        (("local_steps", "--every", "5"), "east"),
        pytest.param(("local_steps", "--every", "5"), "west", marks=pytest.mark.slow),
        pytest.param(("every_step",), "east", marks=pytest.mark.slow),
        pytest.param(("every_step",), "west", marks=pytest.mark.slow),
    ],
)
def test_trainer_killed_and_started_anew(
    one_machine: Stage, tmp_path: Path, book: Book, strategy: tuple[str, ...], at: str
) -> None:
    """From its last checkpoint; also where it is the first cluster, to whose door the other one comes."""
    more = ("--steps", str(STEPS), "--strategy", *strategy, "--save", "steps", "--save-steps", "10")
    with one_machine.jobs(tmp_path, *more) as jobs:
        hurt, other = jobs[at == "east"], jobs[at != "east"]
        hurt.reach(25)
        hurt.process("trainer").send_signal(signal.SIGKILL)
        assert hurt.wait(30) == -signal.SIGKILL
        lost = rf"nebula: cluster '{at}' was lost"
        until(lambda: other.find(lost), 20, f"{other.cluster} logs the loss")
        began = time.time()
        one_machine.again(hurt)
        seconds = max(job.back_after(began) for job in jobs)
        all_end_together(*jobs, steps=STEPS, newcomer=at)
        assert hurt.find("the run has begun without this cluster")
        book.note(
            f"SIGKILL of the trainer of {at}, started anew ({strategy[0]})",
            seconds=seconds,
            limit_s=None,
            outcome="together again",
        )


@pytest.mark.slow
@pytest.mark.parametrize("at", ["west", "east"])
def test_stopped_for_eight_seconds(one_machine: Stage, tmp_path: Path, book: Book, at: str) -> None:
    """A silence of more than five seconds on a line that was never silent; the clusters part, and come together again."""
    with one_machine.jobs(tmp_path, "--steps", "600", "--timeout", "30") as jobs:
        hurt, other = jobs[at == "east"], jobs[at != "east"]
        hurt.reach(350, within_s=120)  # by then the pulse is known
        hurt.process("trainer").send_signal(signal.SIGSTOP)
        try:
            told = until(lambda: other.find(rf"cluster '{at}' was lost"), 8, "the loss")
            assert "it has given no sign of life for" in told
            time.sleep(3)
        finally:
            hurt.process("trainer").send_signal(signal.SIGCONT)
        seconds = max(job.back_after(time.time()) for job in jobs)
        all_end_together(*jobs, steps=600)
        book.note(f"SIGSTOP of the trainer of {at} for 8 s: return", seconds=seconds, limit_s=None, outcome="together")


@pytest.mark.slow
@pytest.mark.netns
def test_link_cut_for_fifteen_seconds(stage: Stage, wan: WideArea, tmp_path: Path, book: Book) -> None:
    with stage.jobs(tmp_path, "--steps", "500", "--timeout", "10") as jobs:
        jobs[0].reach(8)
        wan.cut()
        try:
            for job in jobs:
                until(partial(job.find, "was lost after exchange"), 30, f"{job.cluster} logs the loss")
            time.sleep(3)
        finally:
            wan.restore()
        began = time.time()
        seconds = max(job.back_after(began) for job in jobs)
        all_end_together(*jobs, steps=500)
        book.note("15 s cut of the link: return", seconds=seconds, limit_s=None, outcome="together again")
