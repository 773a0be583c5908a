"""Keys of a local run: gone when its launcher is, and those of killed ones when the next begins."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddlenlp_nebula.security.throwaway import throw_away, throwaway_folder

LAUNCHER = """
import sys
from paddlenlp_nebula.security.throwaway import throw_away, throwaway_folder
with throwaway_folder() as folder:
    throw_away(["west"], folder)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def launcher(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that uses its keys, and their folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env={**os.environ, "TMPDIR": str(place)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_keys_of_a_killed_process_are_swept_at_the_next_start(
    launcher: tuple[subprocess.Popen[str], Path], place: Path
) -> None:
    process, folder = launcher
    with throwaway_folder() as ours:
        assert (folder / "west.key").exists()  # it lives
        assert ours != folder
    process.kill()
    process.wait()
    assert (folder / "west.key").exists()
    with throwaway_folder() as ours:
        throw_away(["west"], ours)
        assert os.listdir(place) == [ours.name]
        with throwaway_folder() as another:
            assert sorted(os.listdir(place)) == sorted([ours.name, another.name])
    assert os.listdir(place) == []


def test_what_is_not_surely_ours_stays(place: Path) -> None:
    victim = place / "documents"
    for folder in (victim, place / "nebula-keys-open", place / "nebula-keys-young", place / "nebula-other"):
        folder.mkdir(mode=0o700)
        (folder / "in-use").touch()
    (place / "nebula-keys-open").chmod(0o755)
    (place / "nebula-keys-young" / "in-use").rename(place / "nebula-keys-young" / "in-use.new")
    (place / "nebula-keys-link").symlink_to(victim)
    (place / "nebula-keys-inside").mkdir(mode=0o700)
    (place / "nebula-keys-inside" / "in-use").symlink_to(victim / "in-use")
    (place / "nebula-keys-file").touch()
    if os.geteuid() == 0:
        (place / "nebula-keys-foreign").mkdir(mode=0o700)
        (place / "nebula-keys-foreign" / "in-use").touch()
        os.chown(place / "nebula-keys-foreign", 12345, -1)
    before = sorted(os.listdir(place))
    with throwaway_folder():
        pass
    assert sorted(os.listdir(place)) == before
    assert (victim / "in-use").exists()


def test_links_in_a_swept_folder_are_not_followed(place: Path) -> None:
    (place / "documents").mkdir()
    (place / "documents" / "thesis").touch()
    (place / "nebula-keys-dead").mkdir(mode=0o700)
    (place / "nebula-keys-dead" / "in-use").touch()
    (place / "nebula-keys-dead" / "link").symlink_to(place / "documents")
    with throwaway_folder():
        assert not (place / "nebula-keys-dead").exists()
    assert (place / "documents" / "thesis").exists()
