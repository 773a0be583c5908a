"""Whatever ends this process' training, the other clusters hear the reason.

PaddleNLP fires no callback event for an exception, so this stands around the training instead: a
context manager where we own the call (NebulaTrainer), an exception hook where we do not.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from paddlenlp_nebula.run import Run

__all__ = ["FarewellHook", "telling_the_others"]


def describe(error: BaseException) -> str:
    """An exception as the end of a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"its process was told to exit ({error.code})"
    return f"it failed with {type(error).__name__}: {error}"


class FarewellHook:
    """Tells the others of an exception that nobody catches, of SIGTERM, and of a silent exit.

    Args:
        run: whose clusters to tell.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._previous_hook = sys.excepthook
        self._reason = "its process ended before its training did"
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        self._handles_sigterm = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        """Training is over: put everything back."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        atexit.unregister(self._at_exit)
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._run.leave(describe(error), deliberate=False)
        self._previous_hook(kind, error, trace)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._reason = "it was terminated (SIGTERM)"
        raise SystemExit(128 + number)

    def _at_exit(self) -> None:
        self._run.leave(self._reason, deliberate=False)


@contextlib.contextmanager
def telling_the_others(run: Run) -> Iterator[None]:
    """Tell the others if the block raises; works where exception hooks do not (notebooks)."""
    hook = FarewellHook(run)
    try:
        yield
    except BaseException as error:
        run.leave(hook._reason if isinstance(error, SystemExit) else describe(error), deliberate=False)
        raise
    finally:
        hook.remove()
