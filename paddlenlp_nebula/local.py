"""The processes of one cluster: only the leader speaks to other clusters, the rest must not starve.

On CPU a gloo collective fails after a fixed 30 s, so while the leader waits for another cluster its
local peers do not sit in one long collective: they take part in a short broadcast every few seconds
that says "still waiting", and finally "done" or "failed".
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["LocalGroup"]

_ANNOUNCE_S = 5.0
_WAITING, _DONE, _FAILED = 0, 1, 2
_SLICE = 4 << 20  # elements per broadcast of a long vector


class LocalGroup:
    """This cluster's own processes.

    Attributes:
        rank, size: this process among them.
        is_leader: whether it is the one that speaks to other clusters.
    """

    def __init__(self) -> None:
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.is_leader = self.rank == 0
        self._announced = 0.0
        self._leading = False

    def lead(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the leader; every process returns its result (JSON) or raises its error.

        While it runs the leader must call `tick` at least every few seconds.
        """
        if self.size == 1:
            return work()
        if not self.is_leader:
            return self._follow()
        self._announced = time.monotonic()
        self._leading = True
        try:
            result = work()
            payload = json.dumps(result).encode()
        except BaseException as error:
            with contextlib.suppress(Exception):  # a local peer may be what failed; the first error matters more
                self._announce(_FAILED, f"{type(error).__name__}: {error}".encode())
            raise
        finally:
            self._leading = False
        self._announce(_DONE, payload)
        return result

    def tick(self) -> None:
        """On the leader, in `lead`: tell the local peers from time to time that the wait goes on.

        At other times nothing: they do not listen then, and would be waited for in vain (by a leader that has failed
        and says goodbye, for example).
        """
        if self._leading and time.monotonic() - self._announced > _ANNOUNCE_S:
            self._announce(_WAITING)

    def sum(self, *numbers: float) -> list[float]:
        """The sums over all local processes."""
        if self.size == 1:
            return list(numbers)
        total = paddle.to_tensor(numbers, dtype=paddle.float32)  # NPU and XPU lack a float64 all-reduce
        dist.all_reduce(total)
        return [float(value) for value in total.numpy()]

    def broadcast(self, vector: Float32Vector) -> None:
        """Copy the leader's float32 vector into everybody's, in place."""
        if self.size == 1:
            return
        for start in range(0, len(vector), _SLICE):
            piece = paddle.to_tensor(vector[start : start + _SLICE])
            dist.broadcast(piece, src=0)
            if not self.is_leader:
                vector[start : start + _SLICE] = piece.numpy()

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Copy one rank's tensor into everybody's, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)

    def _announce(self, status: int, payload: bytes = b"") -> None:
        self._announced = time.monotonic()
        dist.broadcast(paddle.to_tensor([status, len(payload)], dtype=paddle.int32), src=0)
        if payload:
            dist.broadcast(paddle.to_tensor(np.frombuffer(payload, np.uint8).astype(np.int32)), src=0)

    def _follow(self) -> Any:
        while True:
            head = paddle.zeros([2], dtype=paddle.int32)
            dist.broadcast(head, src=0)
            status, length = (int(number) for number in head.numpy())
            payload = b""
            if length:
                body = paddle.zeros([length], dtype=paddle.int32)
                dist.broadcast(body, src=0)
                payload = body.numpy().astype(np.uint8).tobytes()
            if status == _FAILED:
                raise NebulaError(f"this cluster's leader failed: {payload.decode()}")
            if status == _DONE:
                return json.loads(payload)
