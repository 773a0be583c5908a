"""``rendezvous``: where the doors are."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["doors", "rendezvous_problem"]


def doors(rendezvous: str, clusters: Sequence[str]) -> dict[str, str]:
    """Cluster -> "host:port" of its door: ``rendezvous`` gives the first ones theirs, an empty place is none."""
    return {cluster: where for cluster, where in zip(clusters, rendezvous.split(","), strict=False) if where}


def rendezvous_problem(rendezvous: str, clusters: Sequence[str]) -> str | None:
    """What is wrong with it, in a sentence, if anything is."""
    first, *others = rendezvous.split(",")
    if not _is_address(first) or not all(_is_address(where) for where in others if where):
        return (
            "rendezvous must be 'host:port' with a port from 1 to 65535, several of them separated by commas, 'world' or "
            f"'loopback', got {rendezvous!r}"
        )
    if len(others) >= len(clusters):
        return f"rendezvous must give at most one address for each of the {len(clusters)} clusters, got {rendezvous!r}"
    return None


def _is_address(where: str) -> bool:
    host, colon, port = where.rpartition(":")
    named = re.fullmatch(r"[^\s/,]+", host) is not None
    return named and bool(colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
