"""What lies beside the Trainer's checkpoint: whole, or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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


def test_a_single_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_state(tmp_path, {**ARRAYS, "empty": np.zeros(0), "scalar": np.array(0.5)})
    path = tmp_path / STATE_NAME
    good = path.read_bytes()
    assert load_state(path)["scalar"] == 0.5
    header = 8 + int.from_bytes(good[:8], "little")
    generator = np.random.default_rng(0)
    for at in [*range(header), *generator.integers(header, len(good), 200)]:
        if good[at : at + 1] == b" ":  # what pads the header may be any white space
            continue
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << int(generator.integers(8))]) + good[at + 1 :])
        with pytest.raises(NebulaError, match="must hold what this cluster had not sent yet, got a file that cannot"):
            load_state(path)


def test_a_state_of_somebody_else_is_refused(tmp_path: Path) -> None:
    save_file({"turns": np.array([3])}, tmp_path / STATE_NAME)
    with pytest.raises(NebulaError, match=r"has the checksum [0-9a-f]{32} instead of None"):
        load_state(tmp_path / STATE_NAME)
