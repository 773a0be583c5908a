"""Certificates for clusters that live and end together on one machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from paddlenlp_nebula.security.files import write_private, write_public
from paddlenlp_nebula.security.identity import Credentials

__all__ = ["throw_away", "throwaway_folder", "thrown_away"]

_PREFIX = "nebula-keys-"
_LOCK = "in-use"


@contextlib.contextmanager
def throwaway_folder() -> Iterator[Path]:
    """A folder for `throw_away`, for its owner alone, which is gone after the block.

    After SIGKILL nothing removes it, so what killed processes of this user have left is removed before. A process holds a
    lock (flock) in its folder, which ends with it: no other sign of life is needed, nor could a process id be one, since
    containers and machines may share the place for temporary files.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        descriptor = os.open(Path(name, f"{_LOCK}.new"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            Path(name, f"{_LOCK}.new").rename(Path(name, _LOCK))  # locked before anybody else can find it
            yield Path(name)
        finally:
            os.close(descriptor)


def _sweep(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or gone meanwhile
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)  # follows no link, not even where the folder itself was
            finally:
                os.close(descriptor)


def throw_away(clusters: Iterable[str], folder: Path) -> dict[str, Credentials]:
    """Make a CA, let it sign a certificate for each cluster, and forget its key.

    Args:
        clusters: their names.
        folder: where the files go, such as a `throwaway_folder`.
    """
    from paddlenlp_nebula.security.certificates import Authority, new_key, pem, pem_of_key

    authority = Authority.create("nebula, a local run")
    found = {cluster: thrown_away(cluster, folder) for cluster in clusters}
    for cluster, files in found.items():
        key = new_key()
        write_public(Path(files.ca), pem(authority.certificate))
        write_public(Path(files.cert), pem(authority.issue(cluster, key.public_key())))
        write_private(Path(files.key), pem_of_key(key))
    return found


def thrown_away(cluster: str, folder: Path) -> Credentials:
    """A cluster's files in a folder that `throw_away` has filled."""
    return Credentials(cluster, str(folder / "ca.pem"), str(folder / f"{cluster}.pem"), str(folder / f"{cluster}.key"))
