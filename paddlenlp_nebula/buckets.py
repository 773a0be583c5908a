"""Buckets: contiguous slices of the selection's flat vector, the unit of encoding."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_nebula.codec.codec import Layout
from paddlenlp_nebula.selection import Selection

__all__ = ["BUCKET_NUMEL", "Bucket", "cut"]

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


def _shape(selection: Selection, parameter: int, start: int, stop: int) -> tuple[int, ...]:
    whole = stop - start == selection.offsets[parameter + 1] - selection.offsets[parameter]
    return tuple(selection.parameters[parameter].shape) if whole else (stop - start,)
