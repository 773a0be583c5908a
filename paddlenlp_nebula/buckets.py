"""Buckets: contiguous slices of the selection's flat vector, the unit of encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.link.frames import checksum
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.tensors import Tensor, read_into

__all__ = ["BUCKET_NUMEL", "Bucket", "cut", "digests", "gather"]

BUCKET_NUMEL = 63 * 4096
"""Elements per bucket: with its header just under 1 MiB in fp32. Our choice; the same on all clusters."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements start..stop of the flat vector.

    Attributes:
        index: the bucket's number.
        start, stop: its place in the flat vector.
        pieces: (parameter number, start, stop within that parameter) in order.
    """

    index: int
    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def numel(self) -> int:
        """Elements in this bucket."""
        return self.stop - self.start


def cut(selection: Selection, bucket_numel: int = BUCKET_NUMEL) -> list[Bucket]:
    """Cut a selection into buckets of ``bucket_numel`` elements, the last one shorter."""
    buckets = []
    parameter = 0
    for index, start in enumerate(range(0, selection.numel, bucket_numel)):
        stop = min(start + bucket_numel, selection.numel)
        pieces = []
        at = start
        while at < stop:
            while selection.offsets[parameter + 1] <= at:
                parameter += 1
            offset = selection.offsets[parameter]
            end = min(stop, selection.offsets[parameter + 1])
            pieces.append((parameter, at - offset, end - offset))
            at = end
        buckets.append(Bucket(index, start, stop, tuple(pieces)))
    return buckets


def gather(bucket: Bucket, source: Callable[[int], Tensor | None]) -> Float32Vector:
    """The bucket's elements as a fresh float32 vector, shape (bucket.numel,).

    Args:
        bucket: which elements.
        source: parameter number -> the tensor to read (its gradient, say); None reads as zeros.
    """
    vector = np.empty(bucket.numel, dtype=np.float32)
    at = 0
    for parameter, start, stop in bucket.pieces:
        out = vector[at : at + stop - start]
        tensor = source(parameter)
        if tensor is None:
            out.fill(0.0)
        else:
            read_into(tensor, start, stop, out)
        at += stop - start
    return vector


def digests(buckets: list[Bucket], selection: Selection) -> list[int]:
    """A 64-bit hash of each bucket of the parameters' present values."""
    return [checksum(gather(bucket, selection.parameters.__getitem__).data.cast("B")) for bucket in buckets]
