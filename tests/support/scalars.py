"""Reading back what a Trainer has written for VisualDL."""

from __future__ import annotations

from pathlib import Path

__all__ = ["scalars"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """name -> (step, value) of each point, from the only record file in ``folder``."""
    from visualdl import LogReader

    (records,) = folder.glob("vdlrecords.*.log")
    reader = LogReader(file_path=str(records))
    return {
        tag.rpartition("/")[2]: [(point.id, point.value) for point in reader.get_data("scalar", tag)]
        for tag in reader.get_tags()["scalar"]
    }
