"""A cache of folders that appear complete or not at all, however many processes ask for them at once."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["MANIFEST", "Manifest", "cache_root", "publish", "sha256_of"]

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Where a cached folder came from; written beside the data as ``manifest.json``.

    Args:
        name: the data set's name, as given to ``nebula data``.
        package: the package it was taken from.
        version: that package's version.
        licence: the terms the content is under.
        counts: what was found, by kind.
        sha256: hash of each file.
    """

    name: str
    package: str
    version: str
    licence: str
    counts: Mapping[str, int]
    sha256: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, pattern: str = "*") -> None:
        """Write the manifest with the hashes of the files now in ``folder`` whose names match ``pattern``."""
        files = sorted(path for path in folder.glob(pattern) if path.is_file() and path.name != MANIFEST)
        content = asdict(self) | {"sha256": {path.name: sha256_of(path) for path in files}}
        (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a cached folder."""
        return cls(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def cache_root(given: Path | None = None) -> Path:
    """The cache folder: the one given, else $NEBULA_CACHE, else ``~/.cache/paddlenlp_nebula``."""
    return given or Path(os.environ.get("NEBULA_CACHE") or Path.home() / ".cache" / "paddlenlp_nebula")


def sha256_of(path: Path) -> str:
    """Hash of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def publish(target: Path, build: Callable[[Path], None], *, replace: bool = False) -> Path:
    """Make sure that the folder ``target`` exists, building it at most once.

    ``build`` fills a temporary folder beside ``target``, which is renamed when it is complete. A second
    process that asks meanwhile waits and then uses the first one's folder.

    Args:
        target: the folder wanted.
        build: fills the empty folder it is given.
        replace: build anew even if ``target`` exists.
    """
    with _locked(target):
        if target.is_dir() and not replace:
            return target
        prefix = f".{target.name}.building-"
        for abandoned in target.parent.glob(f"{glob.escape(prefix)}*"):  # its builder was killed: we hold the lock
            shutil.rmtree(abandoned)
        workshop = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            fresh = workshop / "new"
            fresh.mkdir()
            build(fresh)
            if target.exists():
                target.rename(workshop / "old")
            fresh.rename(target)
        finally:
            shutil.rmtree(workshop)
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of ``target``; the system releases it when the process dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
