"""Who the clusters are and where their doors are: ``cluster``, ``clusters`` and ``rendezvous``."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["doors", "roster_problems"]


def doors(rendezvous: str, clusters: Sequence[str]) -> dict[str, str]:
    """Cluster -> "host:port" of its door: ``rendezvous`` gives the first ones theirs, an empty place is none."""
    return {cluster: where for cluster, where in zip(clusters, rendezvous.split(","), strict=False) if where}


def roster_problems(cluster: str, clusters: Sequence[str], rendezvous: str) -> list[str]:
    """What is wrong with them, in sentences; empty when all is well."""
    found = []
    shown = ",".join(clusters)
    if not all(_is_name(name) for name in clusters):
        found.append(
            f"clusters must be names of 1 to 63 letters, digits, '-' and '_', separated by commas, got {shown!r}"
        )
    elif len(set(clusters)) != len(clusters):
        found.append(f"clusters must name each cluster once, got {shown!r}")
    elif cluster not in clusters:
        found.append(f"cluster must be one of clusters ({', '.join(clusters)}), got {cluster!r}")
    if len(clusters) > 64:
        found.append(f"clusters must name at most 64 clusters, got {len(clusters)}")
    if rendezvous in ("world", "loopback"):
        return found
    first, *others = rendezvous.split(",")
    if not _is_address(first) or not all(_is_address(where) for where in others if where):
        found.append(
            "rendezvous must be 'host:port' with a port from 1 to 65535, several of them separated by commas without spaces, "
            f"'world' or 'loopback', got {rendezvous!r}"
        )
    elif len(others) >= len(clusters):
        found.append(
            f"rendezvous must give at most one address for each of the {len(clusters)} clusters, got {rendezvous!r}"
        )
    elif len(set(given := [first, *filter(None, others)])) != len(given):
        found.append(f"rendezvous must give each cluster an address of its own, got {rendezvous!r}")
    return found


def _is_name(name: str) -> bool:
    return name.replace("-", "").replace("_", "").isalnum() and len(name.encode()) <= 63


def _is_address(where: str) -> bool:
    host, colon, port = where.rpartition(":")
    named = re.fullmatch(r"[^\s/,;]+", host) is not None
    return named and bool(colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
