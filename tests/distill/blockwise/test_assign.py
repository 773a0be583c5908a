"""The assignment against all others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from paddlenlp_nebula.distill.blockwise.assign import Share, assign
from paddlenlp_nebula.errors import NebulaError


def all_assignments(blocks, processes, start=0, cluster=0):
    """Every sequence of stages that does all blocks, clusters in their order."""
    if start == blocks:
        yield ()
        return
    for at in range(cluster, len(processes)):
        for stop in range(start + 1, blocks + 1):
            for shared in range(1, processes[at] + 1):
                left = [*processes]
                left[at] -= shared
                for rest in all_assignments(blocks, left, stop, at):
                    yield (Share(at, start, stop, shared), *rest)


def seconds(stages, times, transfer):
    computing = [times[s.cluster][s.start : s.stop, s.processes - 1].sum() for s in stages]
    crossing = [transfer[b.start - 1] for a, b in pairwise(stages) if a.cluster != b.cluster]
    return max(computing + crossing)


def measured(draw, blocks, processes):
    """Times that fall with processes, less than in proportion."""
    alone = draw.uniform(0.1, 2.0, blocks)
    return np.stack([alone * (1 / r + draw.uniform(0, 0.2, blocks)) for r in range(1, processes + 1)], axis=1)


@pytest.mark.parametrize("processes", [[1], [3], [4], [1, 1], [1, 1, 1], [2, 1], [2, 2], [1, 3]])
@pytest.mark.parametrize("blocks", [1, 3, 5])
@pytest.mark.parametrize("slow", [0.1, 2.0])
def test_none_is_better(processes, blocks, slow):
    draw = np.random.default_rng([blocks, int(10 * slow), *processes])
    times = [measured(draw, blocks, count) for count in processes]
    transfer = draw.uniform(0, slow, blocks - 1)
    found = assign(times, transfer)
    assert found.seconds == pytest.approx(seconds(found.stages, times, transfer))
    assert found.stages in set(all_assignments(blocks, processes))
    best = min(seconds(stages, times, transfer) for stages in all_assignments(blocks, processes))
    assert found.seconds == pytest.approx(best)


def test_equal_blocks_are_divided_equally():
    found = assign([np.ones((6, 1))] * 3, [0.0] * 5)
    assert [(s.cluster, s.start, s.stop) for s in found.stages] == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
    assert found.seconds == 2


def test_a_block_too_long_for_one_process_is_shared():
    table = np.array([[4.0, 2.0, 4 / 3], [1.0, 0.9, 0.9]])
    assert assign([table], [0.0]).stages == (Share(0, 0, 1, 2), Share(0, 1, 2, 1))


def test_a_link_slower_than_all_computing_is_not_used():
    found = assign([np.ones((4, 1)), np.ones((4, 1))], [5.0] * 3)
    assert len(found.stages) == 1
    assert found.seconds == 4


def test_the_cut_is_where_the_activation_is_small():
    found = assign([np.ones((4, 1)), np.ones((4, 1))], [5.0, 5.0, 1.0])
    assert [s.stop for s in found.stages] == [3, 4]


def test_many_blocks_take_no_time():
    draw = np.random.default_rng(1)
    table = measured(draw, 40, 6)
    assert assign([table, table], draw.uniform(0, 1, 39)).stages[-1].stop == 40


@pytest.mark.parametrize(
    ("times", "transfer", "message"),
    [
        ([np.ones((3, 1))], [0.0], r"cluster 0 must have the shape \(2 blocks, processes\).*got \[3, 1\]"),
        ([np.ones((2, 1)), np.ones((2, 0))], [0.0], "the times of cluster 1"),
        ([np.ones((2, 1))], [-1.0], "finite times of 0 or more"),
        ([np.array([[1.0], [np.nan]])], [0.0], "finite times of 0 or more"),
        ([], [0.0], "one cluster at least"),
    ],
)
def test_times_that_are_none_are_refused(times, transfer, message):
    with pytest.raises(NebulaError, match=message):
        assign(times, transfer)
