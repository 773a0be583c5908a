"""Files that hold secrets: written for their owner alone, and read only if they still are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.errors import SecurityError

__all__ = ["check_private", "read_passphrase", "write_private", "write_public"]

_CATEGORY = "a key file that is not in order"


def write_private(path: Path, content: bytes) -> None:
    """Write a secret with mode 0600; a file that is there is replaced at once or not at all."""
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write what everybody may read, with mode 0644, in the same way: a courier may be reading it."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    with replacing(path) as partial:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(content)


def check_private(path: str | Path, what: str) -> None:
    """Refuse a secret that others can read or change.

    Args:
        path: the file.
        what: its name in the sentence, such as "tls_key".

    Raises:
        SecurityError: it is missing, not a file, another user's, or open to group or others.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise SecurityError(
            f"{what} must be a file that can be read, got {str(path)!r}: {error.strerror}", _CATEGORY
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise SecurityError(f"{what} must be a file, got {str(path)!r}", _CATEGORY)
    if found.st_uid not in (os.geteuid(), 0):
        raise SecurityError(
            f"{what} must belong to the user that trains (user id {os.geteuid()}), but {str(path)!r} belongs to user id "
            f"{found.st_uid}: chown it",
            _CATEGORY,
        )
    if found.st_mode & 0o077:
        raise SecurityError(
            f"{what} must be for its owner alone (mode 0600), but {str(path)!r} has mode {stat.S_IMODE(found.st_mode):04o}: "
            f"chmod 600 it, and if others may have read it, make a new one",
            _CATEGORY,
        )


def read_passphrase(path: str | Path, what: str) -> str:
    """The first line of a passphrase file, which sentences call ``what``.

    Raises:
        SecurityError: others can read the file, or it is empty.
    """
    check_private(path, what)
    line = Path(path).read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    if not line:
        raise SecurityError(
            f"{what} must hold the passphrase in its first line, got an empty line in {str(path)!r}", _CATEGORY
        )
    return line
