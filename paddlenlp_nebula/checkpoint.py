"""What a strategy must keep besides the Trainer's own checkpoint, in a file beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from paddlenlp_nebula.errors import NebulaError

__all__ = ["STATE_NAME", "Arrays", "find_state", "load_state", "save_state"]

STATE_NAME = "nebula_state.safetensors"
Arrays: TypeAlias = dict[str, npt.NDArray[np.generic]]


def save_state(folder: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write the arrays into a checkpoint's folder, atomically: a cluster that is killed meanwhile leaves none."""
    partial = folder / f".{STATE_NAME}.{os.getpid()}"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial)
    partial.replace(folder / STATE_NAME)


def find_state(candidates: Iterable[str | Path | None]) -> Path | None:
    """The first of the checkpoint folders that holds a state."""
    for folder in candidates:
        if folder is not None and (path := Path(folder) / STATE_NAME).is_file():
            return path
    return None


def load_state(path: Path) -> Arrays:
    """Read what `save_state` wrote.

    Raises:
        NebulaError: the file is damaged.
    """
    try:
        return dict(load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise NebulaError(
            f"{path} must hold what this cluster had not sent yet, got a file that cannot be read ({error}): resume from "
            "an earlier checkpoint"
        ) from error
