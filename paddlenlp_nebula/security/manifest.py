"""What is in a folder, file by file, as something that can be signed and compared with the folder later.

A manifest comes from somebody else: every field is checked before it is used, and none of its paths is ever opened. What is
opened is what the folder itself lists, without following a symbolic link.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paddlenlp_nebula.errors import SecurityError

__all__ = ["MANIFEST", "File", "Manifest", "differences", "look_at", "read_manifest"]

MANIFEST = "nebula_manifest.json"
"""Its name in the folder whose files it lists; it does not list itself."""

MAX_BYTES = 1 << 25
"""Of a manifest."""
MAX_FILES = 100_000
"""In a folder and all below it."""
MAX_DEPTH = 32
"""Folders in folders."""

_FORMAT = "nebula-manifest-1"
_MAX_PATH = 1024  # characters
_MAX_SIZE = 1 << 62
_PIECE_BYTES = 1 << 20
_CATEGORY = "a manifest that is not in order"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True)
class File:
    """One file: its size in bytes, and the SHA-256 of its content in lower-case hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a folder, and who says so.

    Attributes:
        files: by path, relative to the folder, with '/' between its parts.
        signed_at: when, by the signer's clock: UTC, such as 2026-11-30T22:20:33Z.
        certificate: the signer's, PEM.
        signature: of `signed_bytes`, in lower-case hex digits; "" while it is not signed.
    """

    files: dict[str, File]
    signed_at: str
    certificate: str
    signature: str = ""

    def signed_bytes(self) -> bytes:
        """What the signature covers: all but itself, in one spelling only."""
        fields = self._fields()
        del fields["signature"]
        return _FORMAT.encode() + b"\0" + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def pack(self) -> bytes:
        """As it is written.

        Raises:
            SecurityError: it is longer than a reader would take.
        """
        data = (json.dumps(self._fields(), indent=1, ensure_ascii=False) + "\n").encode()
        if len(data) > MAX_BYTES:
            raise SecurityError(
                f"a manifest must have at most {MAX_BYTES} bytes, but that of {len(self.files)} files would have "
                f"{len(data)}: sign smaller folders",
                _CATEGORY,
            )
        return data

    def _fields(self) -> dict[str, Any]:
        files = [{"path": path, "size": file.size, "sha256": file.sha256} for path, file in sorted(self.files.items())]
        return {
            "format": _FORMAT,
            "signed_at": self.signed_at,
            "files": files,
            "certificate": self.certificate,
            "signature": self.signature,
        }


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder, each field checked for its type and form; whether its signature is good is not looked at.

    Raises:
        SecurityError: there is none, or it is not in order.
    """
    path = folder / MANIFEST
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SecurityError(
            f"a folder that was signed must hold {MANIFEST}, but in {str(folder)!r} it cannot be read: {error.strerror}",
            _CATEGORY,
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _refuse(path, "it is not a file")
    with open(descriptor, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        _refuse(path, f"it has more than {MAX_BYTES} bytes")
    try:
        return _parse(json.loads(data.decode("utf-8"), **_STRICT))
    except UnicodeDecodeError:
        _refuse(path, "it is not UTF-8")
    except RecursionError:
        _refuse(path, "it nests too deeply")
    except ValueError as error:  # ours, and JSONDecodeError
        _refuse(path, str(error))


def _refuse(path: Path, reason: str) -> NoReturn:
    raise SecurityError(f"{str(path)!r} must be a manifest made by `nebula sign`, but {reason}", _CATEGORY)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it has the number {text:.40}, where only whole ones belong")


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _pairs,
    "parse_int": _integer,
    "parse_float": _no_number,
    "parse_constant": _no_number,
}


def _parse(found: Any) -> Manifest:
    names = ["format", "signed_at", "files", "certificate", "signature"]
    _expect_fields(found, names, "it")
    if found["format"] != _FORMAT:
        raise ValueError(f"its format is {found['format']!r:.60} instead of {_FORMAT!r}")
    for name in ("signed_at", "certificate", "signature"):
        if not isinstance(found[name], str):
            raise ValueError(f"its {name} is no string")
    if not _TIME.fullmatch(found["signed_at"]):
        raise ValueError(f"its signed_at is {found['signed_at']!r:.60}, no time")
    if not isinstance(found["files"], list) or not 1 <= len(found["files"]) <= MAX_FILES:
        raise ValueError(f"its files are no list of 1 to {MAX_FILES}")
    files: dict[str, File] = {}
    for number, entry in enumerate(found["files"]):
        _expect_fields(entry, ["path", "size", "sha256"], f"file {number}")
        path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
        if reason := wrong_with(path):
            raise ValueError(f"the path of file {number}, {path!r:.80}, {reason}")
        if path in files:
            raise ValueError(f"{path!r:.80} is listed twice")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
            raise ValueError(f"the size of {path!r:.80} is {size!r:.40}, no number of bytes")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise ValueError(f"the sha256 of {path!r:.80} is not 64 hex digits")
        files[path] = File(size, sha256)
    return Manifest(files, found["signed_at"], found["certificate"], found["signature"])


def _expect_fields(found: Any, names: list[str], what: str) -> None:
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise ValueError(f"{what} does not have exactly the fields {', '.join(names)}")


def wrong_with(path: Any) -> str | None:
    """Why this cannot be the path of a file in a manifest, as the end of a sentence; None if it can."""
    if not isinstance(path, str):
        return "is no string"
    parts = path.split("/")
    if not 1 <= len(path) <= _MAX_PATH or len(parts) > MAX_DEPTH + 1:
        return f"must have at most {_MAX_PATH} characters and {MAX_DEPTH} folders"
    if not path.isprintable() or "\\" in path:
        return "must be made of printable characters other than backslashes"
    if {"", ".", ".."} & set(parts):
        return "must be relative and stay in the folder"
    return "must not be that of the manifest" if parts[0] == MANIFEST else None


def look_at(folder: Path) -> dict[str, File]:
    """Every file in a folder and below it but the manifest, read once; folders without files leave no trace.

    Raises:
        SecurityError: something is neither a file nor a folder, or its name cannot be in a manifest, or there are too many.
    """
    found: dict[str, File] = {}
    for path, directory, name in _walk(folder):
        if (reason := wrong_with(path)) or len(found) == MAX_FILES:
            reason = reason or f"is more than the {MAX_FILES} files that a folder may have"
            raise SecurityError(f"a file that is to be signed must have a plain name, but {path!r} {reason}", _CATEGORY)
        with _opened(directory, name) as (descriptor, what):
            if descriptor is None:
                raise SecurityError(
                    f"a folder that is to be signed must hold files alone, but {path!r} is {what}: put a copy of what it "
                    "stands for into its place (`cp -rL` copies a whole folder so)",
                    _CATEGORY,
                )
            found[path] = _read(descriptor, path, os.fstat(descriptor).st_size)
    return found


def differences(folder: Path, files: dict[str, File]) -> list[str]:
    """Compare a folder with what it should hold; no more is read of it than that.

    Args:
        folder: the folder; its manifest is left out.
        files: what should be there.

    Returns:
        A sentence for each file that is missing, added or changed, sorted by path; after `MAX_FILES` additions no more is
        looked for.
    """
    sentences: dict[str, str] = {}
    missing, added = set(files), 0
    for path, directory, name in _walk(folder):
        if path not in files:
            sentences[path] = "was added"
            added += 1
            if added > MAX_FILES:
                missing.clear()  # nobody knows
                break
            continue
        missing.discard(path)
        expected = files[path]
        with _opened(directory, name) as (descriptor, what):
            if descriptor is None:
                sentences[path] = f"has changed: it is {what}"
            elif (size := os.fstat(descriptor).st_size) != expected.size:
                sentences[path] = f"has changed: it has {size} bytes instead of {expected.size}"
            elif (got := _read(descriptor, path, size)) != expected:
                sentences[path] = f"has changed: its SHA-256 is {got.sha256} instead of {expected.sha256}"
    sentences.update(dict.fromkeys(missing, "is missing"))
    return [f"{path!r} {sentences[path]}" for path in sorted(sentences)]


def _walk(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Path, open folder and name of everything below a folder that is no folder itself, but not of its manifest."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path, directory, name in _below(descriptor, "", 0):
            if path != MANIFEST:
                yield path, directory, name
    finally:
        os.close(descriptor)


def _below(descriptor: int, prefix: str, depth: int) -> Iterator[tuple[str, int, str]]:
    if depth > MAX_DEPTH:
        raise SecurityError(f"at most {MAX_DEPTH} folders may lie in each other, but {prefix!r} is deeper", _CATEGORY)
    with os.scandir(descriptor) as entries:
        names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name in sorted(names):
        if not names[name]:
            yield prefix + name, descriptor, name
            continue
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        try:
            yield from _below(below, f"{prefix}{name}/", depth + 1)
        finally:
            os.close(below)


@contextmanager
def _opened(directory: int, name: str) -> Iterator[tuple[int | None, str]]:
    """The descriptor of a file; or None, and what is there instead."""
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):  # a device or a pipe is not even opened
        yield None, "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
        return
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        yield (descriptor, "a file") if stat.S_ISREG(os.fstat(descriptor).st_mode) else (None, "no file any more")
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: str, size: int) -> File:
    digest, left = hashlib.sha256(), size
    while piece := os.read(descriptor, min(_PIECE_BYTES, left + 1)):
        digest.update(piece)
        left -= len(piece)
        if left < 0:
            break
    if left:
        raise SecurityError(f"{path!r} must stay as it is while it is read, but its size changes: try again", _CATEGORY)
    return File(size, digest.hexdigest())
