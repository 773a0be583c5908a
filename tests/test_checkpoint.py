"""What lies beside the Trainer's checkpoint: whole, or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_nebula.checkpoint import STATE_NAME, find_state, load_state, save_state
from paddlenlp_nebula.errors import NebulaError

ARRAYS = {"codec/0/residual": np.arange(5000, dtype=np.float32), "turns": np.array([3])}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow above 1 kB; not for as long as a fixture lives, or pytest could not write its own log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_saved_is_found_and_loaded(tmp_path: Path) -> None:
    save_state(tmp_path, ARRAYS)
    path = find_state([None, tmp_path / "elsewhere", tmp_path])
    assert path == tmp_path / STATE_NAME
    loaded = load_state(path)
    assert loaded.keys() == ARRAYS.keys()
    assert all((loaded[name] == array).all() and loaded[name].dtype == array.dtype for name, array in ARRAYS.items())
    assert [file.name for file in tmp_path.iterdir()] == [STATE_NAME]


def test_a_full_disk_keeps_nothing_of_a_state(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(Exception, match="File too large"):
        save_state(tmp_path, ARRAYS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [0, 7, 200, -8])
def test_a_cut_file_is_named(tmp_path: Path, left: int) -> None:
    save_state(tmp_path, ARRAYS)
    path = tmp_path / STATE_NAME
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(NebulaError, match=rf"{STATE_NAME} must hold what this cluster had not sent yet"):
        load_state(path)
