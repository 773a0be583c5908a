"""The output of several clusters on one terminal."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["COLOURS", "LineWriter", "NoticeReader", "RefusalFinder"]

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")

_BREAK = re.compile(r"\r\n|\n|\r(?=.)", re.DOTALL)  # a final \r may be the first half of \r\n
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[ABCDEFGHJKSTfhlsu]")  # moves and erasures; colours stay
_LONGEST = 1 << 16
_NOTICE = re.compile(r" - nebula: (.+?)(?:\x1b\[0m)?\r?$")  # as PaddleNLP's logger writes what the package says
_REFUSAL = re.compile(r"paddlenlp_nebula\.errors\.\w+: (.+)")  # as Python ends its report of an uncaught error of ours


class LineWriter:
    """Turns one cluster's bytes into whole, labelled lines.

    A progress bar redraws itself with carriage returns. Bars of several clusters cannot redraw one terminal, so of
    such a line the newest state is written now and then, and its last state always.

    Args:
        label: put in front of every line.
        write: takes one finished line, line end included.
        progress_every_s: shortest time between two states of one progress bar.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        label: str,
        write: Callable[[str], object],
        *,
        progress_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._write = write
        self._every_s = progress_every_s
        self._clock = clock
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._state = ""  # newest state of a progress bar, not written yet
        self._written_at = float("-inf")

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._text += self._decoder.decode(data)
        start = 0
        for match in _BREAK.finditer(self._text):
            self._segment(self._text[start : match.start()], ended=match.group() != "\r")
            start = match.end()
        self._text = self._text[start:]
        if len(self._text) > _LONGEST:
            self._segment(self._text, ended=True)
            self._text = ""

    def close(self) -> None:
        """Write what is left of an unfinished line."""
        rest = (self._text + self._decoder.decode(b"", final=True)).rstrip("\r")
        self._text = ""
        if rest or self._state:
            self._segment(rest, ended=True)

    def _segment(self, text: str, *, ended: bool) -> None:
        text = _CURSOR.sub("", text).rstrip()
        if ended:
            # A line end after a redrawn line ends that line; it is not an empty line.
            self._emit(text or self._state)
            self._state = ""
        elif text:
            self._state = text
            if self._clock() - self._written_at >= self._every_s:
                self._written_at = self._clock()
                self._emit(text)
                self._state = ""

    def _emit(self, text: str) -> None:
        self._write(f"{self._label}{text}\n")


class RefusalFinder:
    """Finds why the package refused to train in what a cluster printed, where much more may follow.

    Attributes:
        refusal: the last error of ours that ended a process, without the traceback; "" if none has.
    """

    def __init__(self) -> None:
        self.refusal = ""
        self._unfinished = False

    def see(self, line: str) -> None:
        """Take the next line, without its line end."""
        if match := _REFUSAL.match(line):
            self.refusal, self._unfinished = match[1], True
        elif self._unfinished and line.startswith("  - "):  # one of a configuration's problems
            self.refusal += f"\n{line}"
        else:
            self._unfinished = False


class NoticeReader:
    """Reads what the package itself says in a cluster's log, while it grows.

    Args:
        path: the log; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._unfinished = b""

    def new(self) -> list[str]:
        """The sentences since the last call."""
        try:
            with open(self._path, "rb") as log:
                log.seek(self._position)
                data = log.read()
        except OSError:
            return []
        self._position += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [match[1] for line in lines if (match := _NOTICE.search(line.decode("utf-8", "replace")))]
