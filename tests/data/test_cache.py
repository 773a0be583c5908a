"""The cache: folders appear complete or not at all, and are built once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEBULA_CACHE", str(tmp_path / "variable"))
    assert cache_root() == tmp_path / "variable"
    assert cache_root(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("NEBULA_CACHE")
    assert cache_root() == Path.home() / ".cache" / "paddlenlp_nebula"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "data", build)
    assert [path.name for path in tmp_path.iterdir()] == [".data.lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys; from paddlenlp_nebula.data.cache import publish\n"
        "publish(pathlib.Path(sys.argv[1]), lambda folder: os.kill(os.getpid(), signal.SIGKILL))"
    )
    other = tmp_path / ".help-de.building-12345678"  # of another target, whose name begins like ours
    other.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "help")])
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".help.building-*"))) == 1
    publish(tmp_path / "help", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, ".help.lock", "help"]


def test_a_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    publish(tmp_path / "data", lambda folder: (folder / "old").touch())

    def build(folder: Path) -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        publish(tmp_path / "data", build, replace=True)
    assert (tmp_path / "data" / "old").exists()
    publish(tmp_path / "data", lambda folder: (folder / "new").touch(), replace=True)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["new"]


def _build_slowly(folder: Path) -> None:
    (folder / f"builder-{os.getpid()}").touch()
    time.sleep(0.3)


def _ask(target: Path) -> None:
    publish(target, _build_slowly)


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_ask, args=(tmp_path / "data",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_manifest_round_trip(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a")
    Manifest("name", "package", "1.0", "MPL-2.0", {"rows": 1}).write(tmp_path)
    read = Manifest.read(tmp_path)
    assert (read.name, read.counts) == ("name", {"rows": 1})
    assert read.sha256 == {"a.tsv": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"}
