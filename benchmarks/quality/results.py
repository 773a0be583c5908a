"""The results file: rows, appended as runs finish."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.setting import Setting
from benchmarks.quality.training import Training
from paddlenlp_nebula.bench.facts import facts

__all__ = ["Results", "Row", "with_gaps"]

Row = dict[str, Any]
_KEY = ("setting", "start", "clusters", "seed")


class Results:
    """Rows of ``{setting, start, clusters, seed, tokens, bytes_sent, reduction, eval_loss, gap_percent, ...}``.

    Args:
        path: the JSON file; created with the first row.
        training: what all rows have in common; a file of another training is refused.
    """

    def __init__(self, path: Path, training: Training) -> None:
        self._path = path
        self._training = training
        found = self._read()
        if found and found["training"] != asdict(training):
            raise SystemExit(
                f"{path} must hold rows of {asdict(training)}, got {found['training']}: name another --output"
            )

    def rows(self) -> list[Row]:
        """All rows."""
        return with_gaps(self._read().get("rows", []))

    def has(self, setting: Setting, start: str, clusters: int, seed: int) -> bool:
        """Whether this run is done."""
        return any(_key(row) == (str(setting), start, clusters, seed) for row in self.rows())

    def append(self, rows: Sequence[Row]) -> list[Row]:
        """Add those rows that are new, and return them with their gaps; readers see the old file or the new one."""
        here = facts()
        with self._locked():
            content = self._read() or {**here, "training": asdict(self._training), "rows": []}
            known = {_key(row) for row in content["rows"]}
            fresh = [
                {**row, "date": here["date"], "command": here["command"]} for row in rows if _key(row) not in known
            ]
            content["rows"] = with_gaps([*content["rows"], *fresh])
            self._write(content)
            added: list[Row] = content["rows"][len(known) :]
            return added

    def _read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return content

    def _write(self, content: Mapping[str, Any]) -> None:
        head = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=1)
        rows = ",\n".join("  " + json.dumps(row) for row in content["rows"])  # a line each
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')
        partial.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """The rows with their gap to dense of the same start, clusters and seed; None while there is none.

    Dense at its best learning rate: a low reference would be easy to come close to.
    """
    dense: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if Setting.parse(row["setting"]).dense:
            dense[_key(row)[1:]] = min(row["eval_loss"], dense.get(_key(row)[1:], math.inf))
    references = [dense.get(_key(row)[1:]) for row in rows]
    return [
        {**row, "gap_percent": None if reference is None else 100 * (row["eval_loss"] / reference - 1)}
        for row, reference in zip(rows, references, strict=True)
    ]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)
