"""What a process does that is asked to end; the rest is in tests/faults/test_words.py, with real trainers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paddlenlp_nebula import farewell
from paddlenlp_nebula.farewell import TERMINATED, FarewellHook


@pytest.fixture
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_without_a_checkpoint_it_ends_at_once(default: None) -> None:
    hook = FarewellHook(lambda reason: None)
    with pytest.raises(SystemExit) as ending:
        signal.raise_signal(signal.SIGTERM)
    assert ending.value.code == 143
    assert hook.describe(ending.value) == TERMINATED
    hook.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_request_does_not_wait_for_the_checkpoint(default: None) -> None:
    asked: list[None] = []
    hook = FarewellHook(lambda reason: None, lambda: asked.append(None) is None)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert len(asked) == 1
    hook.remove()


def test_a_checkpoint_that_does_not_come_is_not_waited_for(default: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "_CHECKPOINT_S", 0.1)
    hook = FarewellHook(lambda reason: None, lambda: True)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        time.sleep(5)
    hook.remove()


def test_when_the_checkpoint_has_come_nothing_follows(default: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "_CHECKPOINT_S", 0.1)
    hook = FarewellHook(lambda reason: None, lambda: True)
    signal.raise_signal(signal.SIGTERM)
    hook.remove()
    time.sleep(0.3)


def test_another_request_does_not_cut_the_goodbye_short() -> None:
    script = """
import signal
from paddlenlp_nebula.farewell import FarewellHook

def leave(reason):
    print(reason, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("said", flush=True)

hook = FarewellHook(leave)
signal.raise_signal(signal.SIGTERM)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == [TERMINATED, "said"], ended.stderr
    assert ended.stderr == ""
    assert ended.returncode == 143
