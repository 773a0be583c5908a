"""The K most probable tokens of each position, and the mass of all others: ``logits:top32``.

Payload, little-endian: for each row its tail, float16; as int8 also its step, float16; then a stream of ids and codes
(`codec.rice`, a chunk for each row). What travels are logarithms of probabilities relative to the row's largest one,
r = log(p / max p) <= 0, ids in ascending order; the receiver makes them sum to 1, which gives the largest one back:

=====  =============================  =======================================================================
form   code                           error of r
=====  =============================  =======================================================================
int8   round(-r / step), 8 bits       step / 2, or 8e-6 if that is more; step = float16(-smallest kept r / 255)
fp16   float16 of -r                  |r| 2^-11 + 2^-25
=====  =============================  =======================================================================

The tail, relative to the largest probability as well, is as with fp16. Making the sum 1 moves all logarithms of a row
by the same amount, not more than the largest of these errors, so that a logarithm's error is at most twice that.
Logarithms below `NO_MASS` are taken for it.

At K = 32 and a vocabulary of 30,522, int8 takes 4 bytes and the stream, in the mean 77.5 at random ids and never more
than 79.5; log2(30522 choose 32) bits of ids and 32 codes are 76.9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.rice import Entries, Grid, pack, unpack
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.errors import NebulaError

__all__ = ["NO_MASS", "LogitsTopK"]

NO_MASS = -1e4
"""The logarithm of a probability that is none: float16 has it, and its exponential is 0 in float32."""

_LARGEST_KEPT = 4096
_LARGEST_STEP = np.float32(40)  # 255 of them are more than NO_MASS
_WIDTHS = {"int8": 8, "fp16": 16}


class LogitsTopK(Knowledge):
    """A teacher's soft labels.

    Arrays: ``ids``, int32, shape (rows, K), ascending in each row once decoded; ``log_probabilities``, float32, shape
    (rows, K); ``log_tail``, float32, shape (rows,). They are the softmax of the logits over ``tau``. Where the
    vocabulary is smaller than K, all of it travels, and the tail is `NO_MASS`.

    Args:
        kept: K, from 1 to 4096.
        form: ``int8`` or ``fp16``.
        tau: temperature; the tail's mass at another one would be unknown to the receiver.
    """

    grammar = "logits:topK[,int8|fp16][,tau=T]"

    def __init__(self, kept: int, form: str = "int8", tau: float = 1.0) -> None:
        self.kept, self.form, self.tau = kept, form, tau
        options = [f"top{kept}", *([form] * (form != "int8")), *([f"tau={tau:g}"] * (tau != 1.0))]
        self.spec = "logits:" + ",".join(options)

    @classmethod
    def parse(cls, options: Sequence[str]) -> LogitsTopK:
        match = re.fullmatch(r"top(\d{1,4})", options[0]) if options else None
        if not match or not 1 <= int(match[1]) <= _LARGEST_KEPT:
            raise ValueError(f"K must be a whole number from 1 to {_LARGEST_KEPT}")
        form, tau = "int8", "1"
        for option in options[1:]:
            if option in _WIDTHS:
                form = option
            elif option.startswith("tau="):
                tau = option[4:]
            else:
                raise ValueError(f"an option must be int8, fp16 or tau=T, got {option!r}")
        if not re.fullmatch(r"\d{1,3}(\.\d{1,4})?", tau) or not 0.0 < float(tau) <= 100.0:
            raise ValueError(f"T must be above 0 and at most 100, got {tau!r}")
        return cls(int(match[1]), form, float(tau))

    def names(self) -> tuple[str, ...]:
        return "ids", "log_probabilities", "log_tail"

    def estimate(self, extent: Extent) -> int:
        return self._head(extent) + ceil(self._grid(extent).expected_bits(_WIDTHS[self.form]) / 8)

    def bound(self, extent: Extent) -> int:
        return self._head(extent) + ceil(self._grid(extent).most_bits(_WIDTHS[self.form]) / 8)

    def memory(self, extent: Extent) -> int:
        return 2 * self.bound(extent) + extent.rows * (100 + 60 * self._kept(extent)) + 4096

    def encode(self, arrays: Mapping[str, npt.NDArray[Any]], extent: Extent) -> memoryview:
        rows, kept = extent.rows, self._kept(extent)
        ids = self.take(arrays, "ids", (rows, kept), np.int64)
        values = self.take(arrays, "log_probabilities", (rows, kept), np.float32)
        tail = self.take(arrays, "log_tail", (rows,), np.float32)
        order = np.argsort(ids, axis=1)
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
        if (np.diff(ids, axis=1) <= 0).any() or (ids < 0).any() or (ids >= extent.vocabulary).any():
            raise NebulaError(f"the ids of a row of {self.spec} must differ and be below {extent.vocabulary}")
        largest = values.max(axis=1, initial=NO_MASS)
        relative = np.clip(values - largest[:, np.newaxis], NO_MASS, 0)
        head = [np.clip(tail - largest, NO_MASS, -NO_MASS).astype("<f2")]
        if self.form == "int8":
            steps = (relative.min(axis=1, initial=0) / -255).astype("<f2")
            head.append(steps)
            divisor = np.where(steps > 0, steps, 1).astype(np.float32)[:, np.newaxis]
            codes = np.minimum(np.rint(-relative / divisor), 255).astype(np.uint32)
        else:
            codes = np.abs(relative).astype(np.float16).view(np.uint16).astype(np.uint32)
        positions = ids + np.arange(rows)[:, np.newaxis] * extent.vocabulary
        entries = Entries(positions.ravel(), np.full(rows, kept, dtype=np.int32))
        stream = pack(entries, codes.ravel(), _WIDTHS[self.form], self._grid(extent))
        return memoryview(b"".join([*(part.tobytes() for part in head), stream]))

    def decode(self, payload: memoryview, extent: Extent) -> Arrays:
        self.check_length(payload, extent)
        rows, kept, head = extent.rows, self._kept(extent), self._head(extent)
        if payload.nbytes < head:
            raise self.refusal(extent, f"at least {head} bytes", f"{payload.nbytes}")
        try:
            entries, codes = unpack(payload[head:], _WIDTHS[self.form], self._grid(extent))
        except ValueError as error:
            raise self.refusal(extent, "a stream of ids and codes", str(error)) from None
        if not (entries.counts == kept).all():
            raise self.refusal(extent, f"{kept} tokens in each row", f"{entries.counts.min()} in one")
        ids = entries.positions.reshape(rows, kept) - np.arange(rows)[:, np.newaxis] * extent.vocabulary
        words = np.frombuffer(payload[:head], dtype="<f2").astype(np.float32)
        tail, steps = words[:rows], words[rows:, np.newaxis]
        codes, fine = codes.reshape(rows, kept), (steps >= 0) & (steps <= _LARGEST_STEP)
        if self.form == "int8":
            relative = -(codes.astype(np.float32) * np.where(fine, steps, 0))
        else:
            relative = -codes.astype(np.uint16).view(np.float16).astype(np.float32)
        valid = (np.abs(tail) <= -NO_MASS).all() and fine.all()
        # A row's largest probability is its unit: it has the code 0, and nothing stands for more.
        if not (valid and np.isfinite(relative).all() and (relative.max(axis=1, initial=NO_MASS) == 0).all()):
            raise self.refusal(extent, "logarithms relative to the largest probability", "others")
        return {"ids": ids.astype(np.int32)} | _normalized(relative, tail)

    def _kept(self, extent: Extent) -> int:
        return min(self.kept, extent.vocabulary)

    def _grid(self, extent: Extent) -> Grid:
        """A chunk for each row."""
        return Grid(extent.rows * extent.vocabulary, self._kept(extent), max(extent.vocabulary, 1))

    def _head(self, extent: Extent) -> int:
        """Bytes in front of the stream."""
        return extent.rows * (4 if self.form == "int8" else 2)


def _normalized(relative: npt.NDArray[np.float32], tail: npt.NDArray[np.float32]) -> Arrays:
    """Logarithms of probabilities that sum to 1, from those relative to the largest kept one."""
    unit = np.maximum(tail, 0)  # in which the sum neither overflows nor vanishes
    total = unit + np.log(np.exp(relative - unit[:, np.newaxis]).sum(axis=1) + np.exp(tail - unit))
    return {
        "log_probabilities": np.maximum(relative - total[:, np.newaxis], NO_MASS),
        "log_tail": np.maximum(tail - total, NO_MASS),
    }
