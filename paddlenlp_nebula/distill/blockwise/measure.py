"""How long each block takes, for `assign.assign`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import paddle

from paddlenlp_nebula.distill.blockwise.pair import Pair
from paddlenlp_nebula.distill.blockwise.stage import Activation
from paddlenlp_nebula.errors import NebulaError

__all__ = ["activation_bytes", "block_times"]


def block_times(
    pairs: Sequence[Pair], batch: Activation, *, processes: int = 1, rounds: int = 3
) -> npt.NDArray[np.float64]:
    """Seconds of each block, teacher and student, for a batch divided between 1, 2, ... processes.

    The median of some rounds after one that is not counted. Copies of the students' blocks learn, so that nothing is
    changed. The averaging of gradients between processes is not in it.

    Args:
        pairs: of the whole model.
        batch: token ids, of the usual size.
        processes: P.
        rounds: that count.

    Returns:
        Shape (blocks, P): [b, r - 1] with the largest of r parts of the batch.

    Raises:
        NebulaError: there are more processes than samples.
    """
    samples = len(batch.mask)
    if not 1 <= processes <= samples or rounds < 1:
        raise NebulaError(
            f"times must be measured in 1 round or more, with 1 to {samples} processes (samples of the batch), got "
            f"{rounds} and {processes}"
        )
    times = np.empty((len(pairs), processes))
    for shared in range(1, processes + 1):
        most = -(-samples // shared)
        part = Activation(batch.number, batch.mask[:most], batch.values[:most])
        state, mask = part.tensors()
        for block, pair in enumerate(pairs):
            twin, seconds = pair.twin(), []
            for _ in range(rounds + 1):
                began = _now()
                target = twin.teach(state, mask)
                twin.learn(state, target, mask, part.places)
                seconds.append(_now() - began)
            times[block, shared - 1] = np.median(seconds[1:])
            state = target
    return times


def activation_bytes(batch: Activation, width: int, bytes_per_number: float) -> float:
    """Of one relayed activation: positions that count times width times 4 (fp32), 2 (fp16) or about 1 (int8)."""
    return batch.places.count * width * bytes_per_number


def _now() -> float:
    """Seconds, when the device has done all it was asked."""
    if paddle.device.get_device() != "cpu":
        paddle.device.synchronize()
    return time.perf_counter()
