"""Data sets as TSV files, a line for each row."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paddlenlp_nebula.data.clients import DataUnavailable

__all__ = ["read_rows"]

Row = TypeVar("Row", bound=tuple[str, ...])


def read_rows(path: Path, kind: type[Row], columns: str, what: str) -> list[Row]:
    """The rows of a TSV file, none of whose cells is empty.

    Args:
        path: of the file.
        kind: a NamedTuple with a field for each column.
        columns: their names, for errors: "page, English and German".
        what: the rows are, for errors.

    Raises:
        DataUnavailable: the file is missing or empty, or a line has another number of columns.
    """
    if not path.is_file():
        raise DataUnavailable(f"expected a file {path} with the columns {columns}, found none")
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        cells = line.split("\t")
        if len(cells) != len(fields) or not all(cells):
            raise DataUnavailable(f"expected {columns}, separated by tabs, in {path}:{number}, got {line!r}")
        rows.append(kind(*cells))
    if not rows:
        raise DataUnavailable(f"expected {what} in {path}, found an empty file")
    return rows
