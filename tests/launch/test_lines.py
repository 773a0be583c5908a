"""LineWriter: whole labelled lines out of whatever pieces a pipe delivers."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.launch.lines import LineWriter, RefusalFinder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(*pieces: bytes) -> list[str]:
    lines: list[str] = []
    writer = LineWriter("west | ", lines.append, clock=Clock())
    for piece in pieces:
        writer.feed(piece)
    writer.close()
    return lines


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"one\ntwo\n",), ["one", "two"]),
        ((b"on", b"e\nt", b"wo"), ["one", "two"]),
        ((b"\n",), [""]),
        ((b"",), []),
        ((b"dos\r", b"\nend\r\n"), ["dos", "end"]),
        (("grüß ".encode()[:3], "grüß ".encode()[3:] + b"gott\n"), ["grüß gott"]),
        ((b"\xff\n",), ["\ufffd"]),
        ((b"\x1b[A\x1b[32mgreen\x1b[0m\x1b[K\n",), ["\x1b[32mgreen\x1b[0m"]),
    ],
)
def test_lines_are_whole_and_labelled(pieces: tuple[bytes, ...], expected: list[str]) -> None:
    assert written(*pieces) == [f"west | {line}\n" for line in expected]


def test_a_progress_bar_shows_its_first_and_its_last_state() -> None:
    bar = b"".join(b"\r%d%%" % percent for percent in range(0, 101, 10))
    assert written(bar + b"\ndone\n") == ["west | 0%\n", "west | 100%\n", "west | done\n"]
    assert written(*(bytes([byte]) for byte in bar)) == ["west | 0%\n", "west | 100%\n"]


def test_a_progress_bar_shows_a_state_now_and_then() -> None:
    lines: list[str] = []
    clock = Clock()
    writer = LineWriter("", lines.append, progress_every_s=5, clock=clock)
    for second in range(12):
        clock.now = second
        writer.feed(b"\r%d" % second)
    assert lines == ["0\n", "5\n", "10\n"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines: list[str] = []
    writer = LineWriter("", lines.append)
    for _ in range(20):
        writer.feed(b"x" * 10_000)
    assert sum(map(len, lines)) > 100_000


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        ([], ""),
        (["Traceback (most recent call last):", "ValueError: a reason"], ""),
        (["  paddlenlp_nebula.errors.PeerLost: quoted"], ""),
        (
            ["paddlenlp_nebula.errors.PeerLost: cluster 'east' is gone: it failed", "I0 launch: exit"],
            "cluster 'east' is gone: it failed",
        ),
        (
            ["paddlenlp_nebula.errors.ConfigurationError: two problems:", "  - one", "  - two", "", "  - three"],
            "two problems:\n  - one\n  - two",
        ),
        (["paddlenlp_nebula.errors.NebulaError: one", "paddlenlp_nebula.errors.NebulaError: two"], "two"),
    ],
)
def test_a_refusal_is_found(lines: list[str], refusal: str) -> None:
    finder = RefusalFinder()
    for line in lines:
        finder.see(line)
    assert finder.refusal == refusal
