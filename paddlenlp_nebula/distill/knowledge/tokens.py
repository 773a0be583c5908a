"""Knowledge that is token ids or classes: generated sequences, and labels.

An id takes 2 bytes where the vocabulary has at most 65,536 of them, else 4; little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.errors import NebulaError

__all__ = ["GeneratedSequence", "Labels"]


class _Ids(Knowledge):
    """What both have in common."""

    @classmethod
    def parse(cls, options: Sequence[str]) -> Knowledge:
        if options:
            raise ValueError(f"{cls.grammar} takes no options")
        return cls()

    def __init__(self) -> None:
        self.spec = self.grammar

    def _word(self, extent: Extent) -> np.dtype[Any]:
        return np.dtype("<u2" if extent.vocabulary <= 1 << 16 else "<u4")

    def _pack(self, ids: npt.NDArray[Any], extent: Extent) -> bytes:
        if ((ids < 0) | (ids >= extent.vocabulary)).any():
            bad = ids[(ids < 0) | (ids >= extent.vocabulary)][0]
            raise NebulaError(f"an id of {self.spec} must be from 0 to {extent.vocabulary - 1}, got {bad}")
        return ids.astype(self._word(extent)).tobytes()

    def _unpack(self, payload: memoryview, extent: Extent) -> npt.NDArray[np.int32]:
        ids = np.frombuffer(payload, dtype=self._word(extent))
        if (ids >= extent.vocabulary).any():
            raise self.refusal(extent, f"ids below {extent.vocabulary}", f"{ids.max()}")
        return ids.astype(np.int32)


class Labels(_Ids):
    """The teacher's own label of each row, its most probable token or class.

    Arrays: ``labels``, int32, shape (rows,).
    """

    grammar = "labels"

    def names(self) -> tuple[str, ...]:
        return ("labels",)

    def estimate(self, extent: Extent) -> int:
        return extent.rows * self._word(extent).itemsize

    def bound(self, extent: Extent) -> int:
        return self.estimate(extent)

    def memory(self, extent: Extent) -> int:
        return 5 * extent.rows + 4096

    def encode(self, arrays: Mapping[str, npt.NDArray[Any]], extent: Extent) -> memoryview:
        return memoryview(self._pack(self.take(arrays, "labels", (extent.rows,), np.int64), extent))

    def decode(self, payload: memoryview, extent: Extent) -> Arrays:
        if payload.nbytes != self.bound(extent):
            raise self.refusal(extent, f"{self.bound(extent)} bytes", f"{payload.nbytes}")
        return {"labels": self._unpack(payload, extent)}


class GeneratedSequence(_Ids):
    """Targets that the teacher generated (Kim and Rush 2016, arXiv 1606.07947, section 3.2), one for each sample.

    Arrays: ``sequence``, int32, shape (samples, longest), of which ``lengths``, int32, shape (samples,), count; the
    rest is 0. Payload: the lengths, 4 bytes each, then the ids of one sample after another.
    """

    grammar = "sequence"

    def names(self) -> tuple[str, ...]:
        return "sequence", "lengths"

    def estimate(self, extent: Extent) -> int:
        """As long as can be: how long targets are is known to the teacher only."""
        return self.bound(extent)

    def bound(self, extent: Extent) -> int:
        return extent.samples * (4 + extent.longest * self._word(extent).itemsize)

    def memory(self, extent: Extent) -> int:
        return extent.samples * (40 + 32 * extent.longest) + 4096

    def encode(self, arrays: Mapping[str, npt.NDArray[Any]], extent: Extent) -> memoryview:
        lengths = self.take(arrays, "lengths", (extent.samples,), np.int64)
        sequence = self.take(arrays, "sequence", (extent.samples, extent.longest), np.int64)
        if ((lengths < 0) | (lengths > extent.longest)).any():
            raise NebulaError(f"a length of {self.spec} must be from 0 to {extent.longest}, got {lengths.tolist()}")
        return memoryview(lengths.astype("<u4").tobytes() + self._pack(sequence[_used(lengths, extent)], extent))

    def decode(self, payload: memoryview, extent: Extent) -> Arrays:
        self.check_length(payload, extent)
        head = 4 * extent.samples
        if payload.nbytes < head:
            raise self.refusal(extent, f"at least {head} bytes", f"{payload.nbytes}")
        lengths = np.frombuffer(payload[:head], dtype="<u4").astype(np.int64)
        if (lengths > extent.longest).any():
            raise self.refusal(extent, f"sequences of at most {extent.longest} tokens", f"one of {lengths.max()}")
        size = head + int(lengths.sum()) * self._word(extent).itemsize
        if payload.nbytes != size:
            raise self.refusal(extent, f"{size} bytes by its own lengths", f"{payload.nbytes}")
        sequence = np.zeros((extent.samples, extent.longest), dtype=np.int32)
        sequence[_used(lengths, extent)] = self._unpack(payload[head:], extent)
        return {"sequence": sequence, "lengths": lengths.astype(np.int32)}


def _used(lengths: npt.NDArray[np.int64], extent: Extent) -> npt.NDArray[np.bool_]:
    """Which places of the array hold a token."""
    used: npt.NDArray[np.bool_] = np.arange(extent.longest) < lengths[:, np.newaxis]
    return used
