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
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

__all__ = ["TERMINATED", "FarewellHook", "telling_the_others"]

TERMINATED = "it was terminated (SIGTERM)"
_CHECKPOINT_S = 20.0  # schedulers kill some 30 s after they have asked


def _describe(error: BaseException) -> str:
    """An exception as the end of a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"its process was told to exit ({error.code})"
    return f"it failed with {type(error).__name__}: {error}"


class FarewellHook:
    """Tells the others of an exception that nobody catches, of SIGTERM, and of a silent exit.

    Args:
        leave: says goodbye, given the reason; does nothing the second time.
        defer: asked at the first SIGTERM: whether a checkpoint is written first, and the process ends itself then. If it
            has not within 20 s, or at the second SIGTERM, it ends without.
    """

    def __init__(self, leave: Callable[[str], None], defer: Callable[[], bool] = lambda: False) -> None:
        self._leave = leave
        self._defer = defer
        self._timer: threading.Timer | None = None
        self._terminated = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        self._handles_sigterm = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def describe(self, error: BaseException) -> str:
        """Why training ends, as the end of a sentence."""
        return TERMINATED if self._terminated and isinstance(error, SystemExit) else _describe(error)

    def remove(self) -> None:
        """Training is over: put everything back."""
        if self._timer is not None:
            self._timer.cancel()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        atexit.unregister(self._at_exit)
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._leave(_describe(error))
        finally:
            self._previous_hook(kind, error, trace)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        first, self._terminated = not self._terminated, True
        if first and self._defer():
            again = (threading.get_ident(), signal.SIGTERM)
            self._timer = threading.Timer(_CHECKPOINT_S, signal.pthread_kill, again)
            self._timer.daemon = True
            self._timer.start()
            return
        raise SystemExit(128 + number)

    def _at_exit(self) -> None:
        if self._handles_sigterm:  # it is ending already; another request would only cut the goodbye short
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._leave(TERMINATED if self._terminated else "its process ended before its training did")


@contextlib.contextmanager
def telling_the_others(leave: Callable[[str], None], defer: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Tell the others if the block raises; works where exception hooks do not (notebooks).

    Args:
        leave, defer: as for `FarewellHook`.
    """
    hook = FarewellHook(leave, defer)
    try:
        yield
    except BaseException as error:
        leave(hook.describe(error))
        raise
    finally:
        hook.remove()
