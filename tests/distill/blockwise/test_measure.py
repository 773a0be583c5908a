"""Measured times: those of the blocks, without changing these."""

from __future__ import annotations

import time

import numpy as np
import pytest

from paddlenlp_nebula.distill.blockwise.assign import assign
from paddlenlp_nebula.distill.blockwise.measure import activation_bytes, block_times
from paddlenlp_nebula.errors import NebulaError

from .models import batches, pairs


def slow_down(pair, seconds_per_sample):
    pair.teacher.register_forward_pre_hook(lambda _, given: time.sleep(seconds_per_sample * len(given[0])))


def test_the_slow_block_is_found_and_shared():
    built = pairs("perceptron")
    slow_down(built[1], 0.1)
    (batch,) = batches(1)
    times = block_times(built, batch, processes=2, rounds=2)
    assert times.shape == (3, 2)
    assert times[1, 0] >= 0.4
    assert times[1, 1] >= 0.2
    assert (times[[0, 2]] < times[1]).all()
    middle = next(stage for stage in assign([times], [0.0] * 2).stages if stage.start <= 1 < stage.stop)
    assert middle.processes == 2


def test_nothing_is_changed():
    built = pairs("bert")
    before = [parameter.numpy() for pair in built for parameter in pair.student.parameters()]
    (batch,) = batches(1)
    block_times(built, batch, rounds=1)
    after = [parameter.numpy() for pair in built for parameter in pair.student.parameters()]
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)


def test_bytes_are_those_of_positions_that_count():
    (_, batch) = batches(2)
    assert activation_bytes(batch, 16, 4) == batch.mask.sum() * 64


@pytest.mark.parametrize(("processes", "rounds"), [(5, 1), (0, 1), (1, 0)])
def test_what_cannot_be_measured_is_refused(processes, rounds):
    (batch,) = batches(1)
    with pytest.raises(NebulaError, match="with 1 to 4 processes"):
        block_times(pairs("perceptron"), batch, processes=processes, rounds=rounds)
