"""Which blocks run where: the assignment whose slowest stage is fastest.

Pipe-BD (arXiv 2301.12443, abstract) extends its pipeline to hybrid parallelism to balance the load: a stage's blocks may
be shared by several processes, each with a part of the batch. Its code measures every block at the batch divided by 1,
2, ... (``NAS/profile.py`` of github.com/hongsunjang/pipe-bd), and so do we (`measure.block_times`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.errors import NebulaError

__all__ = ["Assignment", "Share", "assign"]


@dataclass(frozen=True)
class Share:
    """One stage.

    Attributes:
        cluster: its index.
        start, stop: of its blocks.
        processes: that divide each batch between them.
    """

    cluster: int
    start: int
    stop: int
    processes: int


@dataclass(frozen=True)
class Assignment:
    """Stages in their order.

    Attributes:
        stages: all blocks, each once; a cluster or a process that would not help has none.
        seconds: for a batch once the pipeline is full: the slowest stage's, or the slowest transfer's.
    """

    stages: tuple[Share, ...]
    seconds: float


def assign(times: Sequence[npt.NDArray[np.float64]], transfer_s: Sequence[float]) -> Assignment:
    """The best assignment of consecutive blocks to clusters in the given order, found exactly.

    A stage takes the sum of its blocks' times. Computing and transfer go on side by side, so a batch takes the longest
    of all stages and of all transfers between clusters; within a cluster transfers are taken to cost nothing.

    Dynamic programming over the blocks done so far, cluster by cluster: for N blocks in a cluster of P processes
    O(N^2 P^2) steps, and O(N P) assignments of at most N stages held at once. Exact: a longest
    time never falls where a beginning is replaced by a slower one.

    Args:
        times: for each cluster seconds, shape (N, P): [b, r - 1] is block b's (teacher and student) with a batch divided
            between r of the cluster's P processes, the averaging of gradients included.
        transfer_s: seconds to send the teacher's activation behind each block but the last, N - 1: bytes / rate.

    Raises:
        NebulaError: shapes do not fit together, or a time is negative or no number.
    """
    blocks = len(transfer_s) + 1
    for cluster, table in enumerate(times):
        if table.ndim != 2 or table.shape[0] != blocks or table.shape[1] < 1:
            raise NebulaError(
                f"the times of cluster {cluster} must have the shape ({blocks} blocks, processes), as there are "
                f"{blocks - 1} transfers, got {list(table.shape)}"
            )
    numbers = np.concatenate([*(table.ravel() for table in times), np.asarray(transfer_s, dtype=np.float64)])
    if not times or not np.isfinite(numbers).all() or (numbers < 0).any():
        raise NebulaError("an assignment needs one cluster at least, and finite times of 0 or more")
    # best[b]: how blocks 0..b are done soonest in the clusters so far
    best: list[Assignment | None] = [Assignment((), 0.0)] + [None] * blocks
    for cluster, table in enumerate(times):
        best = _with_cluster(best, cluster, table, transfer_s)
    found = best[blocks]
    assert found is not None  # any one cluster can do them all
    return found


def _with_cluster(
    before: list[Assignment | None], cluster: int, table: npt.NDArray[np.float64], transfer_s: Sequence[float]
) -> list[Assignment | None]:
    """The best after one more cluster, given the best before it."""
    blocks, processes = table.shape
    until = np.vstack([np.zeros(processes), np.cumsum(table, axis=0)])
    entered = [_later(known, transfer_s[b - 1] if b else 0.0) for b, known in enumerate(before[:-1])] + [None]
    # reached[p][b]: with p of its processes in use
    reached: list[list[Assignment | None]] = [entered]
    for used in range(1, processes + 1):
        row: list[Assignment | None] = [None] * (blocks + 1)
        for stop in range(1, blocks + 1):
            for shared in range(1, used + 1):
                for start in range(stop):
                    known = reached[used - shared][start]
                    if known is None:
                        continue
                    seconds = max(known.seconds, float(until[stop, shared - 1] - until[start, shared - 1]))
                    if seconds < _seconds(row[stop]):
                        stage = Share(cluster, start, stop, shared)
                        row[stop] = Assignment((*known.stages, stage), seconds)
        reached.append(row)
    # the first of equals: without this cluster, then with the fewest of its processes
    return [min(choices, key=_seconds) for choices in zip(before, *reached[1:], strict=True)]


def _later(known: Assignment | None, seconds: float) -> Assignment | None:
    return known and Assignment(known.stages, max(known.seconds, seconds))


def _seconds(known: Assignment | None) -> float:
    return math.inf if known is None else known.seconds
