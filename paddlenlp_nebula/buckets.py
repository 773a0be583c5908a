"""Buckets: contiguous slices of the selection's flat vector, the unit of encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paddlenlp_nebula.codec.codec import Float32Vector, Layout
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
        layout: the pieces' shapes: a whole parameter has its own, a part is flat.
    """

    index: int
    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]
    layout: Layout

    @property
    def numel(self) -> int:
        """Elements in this bucket."""
        return self.stop - self.start


def cut(selection: Selection, bucket_numel: int = BUCKET_NUMEL, *, whole_tensors: bool = False) -> list[Bucket]:
    """Cut a selection into buckets of ``bucket_numel`` elements, the last one shorter.

    Args:
        selection: the parameters.
        bucket_numel: elements per bucket.
        whole_tensors: end each bucket with the parameter that fills it, so that none is cut in two.
    """
    buckets: list[Bucket] = []
    parameter = start = 0
    while start < selection.numel:
        stop = min(start + bucket_numel, selection.numel)
        if whole_tensors:
            stop = next(end for end in selection.offsets if end >= stop)
        pieces = []
        at = start
        while at < stop:
            while selection.offsets[parameter + 1] <= at:
                parameter += 1
            offset = selection.offsets[parameter]
            end = min(stop, selection.offsets[parameter + 1])
            pieces.append((parameter, at - offset, end - offset))
            at = end
        layout = Layout(tuple(_shape(selection, *piece) for piece in pieces))
        buckets.append(Bucket(len(buckets), start, stop, tuple(pieces), layout))
        start = stop
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


def digests(buckets: list[Bucket], source: Callable[[int], Tensor]) -> list[int]:
    """A 64-bit hash of each bucket of the parameters' present values, read as `gather` reads them."""
    return [checksum(gather(bucket, source).data.cast("B")) for bucket in buckets]


def _shape(selection: Selection, parameter: int, start: int, stop: int) -> tuple[int, ...]:
    whole = stop - start == selection.offsets[parameter + 1] - selection.offsets[parameter]
    return tuple(selection.parameters[parameter].shape) if whole else (stop - start,)
