"""What a strategy must keep besides the Trainer's own checkpoint, in a file beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.errors import NebulaError

__all__ = ["STATE_NAME", "Arrays", "find_state", "load_state", "save_state"]

STATE_NAME = "nebula_state.safetensors"
Arrays: TypeAlias = dict[str, npt.NDArray[np.generic]]

_CHECKSUM = "xxh3_128"  # in the file's metadata


def save_state(folder: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write the arrays into a checkpoint's folder, atomically: a cluster that is killed meanwhile leaves none."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with replacing(folder / STATE_NAME) as partial:
        save_file(contiguous, partial, {_CHECKSUM: _checksum(contiguous)})


def find_state(candidates: Iterable[str | Path | None]) -> Path | None:
    """The first of the checkpoint folders that holds a state."""
    for folder in candidates:
        if folder is not None and (path := Path(folder) / STATE_NAME).is_file():
            return path
    return None


def load_state(path: Path) -> Arrays:
    """Read what `save_state` wrote.

    Raises:
        NebulaError: the file is damaged, be it by a single bit.
    """
    try:
        with safe_open(path, framework="np") as file:
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            expected = (file.metadata() or {}).get(_CHECKSUM)
        if (found := _checksum(arrays)) != expected:
            raise ValueError(f"its content has the checksum {found} instead of {expected}")
        return arrays
    except (OSError, ValueError, SafetensorError) as error:
        raise NebulaError(
            f"{path} must hold what this cluster had not sent yet, got a file that cannot be read ({error}): resume from "
            "an earlier checkpoint"
        ) from error


def _checksum(arrays: Mapping[str, npt.NDArray[np.generic]]) -> str:
    """Of names, types, shapes and values; the arrays are contiguous."""
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
