"""Certificates for clusters that live and end together on one machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paddlenlp_nebula.security.files import write_private, write_public
from paddlenlp_nebula.security.identity import Credentials

__all__ = ["throw_away", "thrown_away"]


def throw_away(clusters: Iterable[str], folder: Path) -> dict[str, Credentials]:
    """Make a CA, let it sign a certificate for each cluster, and forget its key.

    Args:
        clusters: their names.
        folder: where the files go; its owner's alone, and removed by the caller afterwards.
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
