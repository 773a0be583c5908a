"""Certificates for clusters that live and end together on one machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paddlenlp_nebula.security.identity import Credentials

__all__ = ["throw_away"]


def throw_away(clusters: Iterable[str], folder: Path) -> dict[str, Credentials]:
    """Make a CA, let it sign a certificate for each cluster, and forget its key.

    Args:
        clusters: their names.
        folder: where the files go; its owner's alone, and removed by the caller afterwards.
    """
    from paddlenlp_nebula.security.certificates import Authority, new_key, pem, pem_of_key
    from paddlenlp_nebula.security.files import write_private, write_public

    authority = Authority.create("nebula, a local run")
    ca = folder / "ca.pem"
    write_public(ca, pem(authority.certificate))
    found = {}
    for cluster in clusters:
        key = new_key()
        files = Credentials(cluster, str(ca), str(folder / f"{cluster}.pem"), str(folder / f"{cluster}.key"))
        write_public(Path(files.cert), pem(authority.issue(cluster, key.public_key())))
        write_private(Path(files.key), pem_of_key(key))
        found[cluster] = files
    return found
