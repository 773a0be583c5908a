"""Times codecs, bucket by bucket as a round does: ``python -m paddlenlp_nebula.bench.codec_rounds PLAN``.

Prints a JSON object a line: a row as soon as it is known, or the name of a peer that cannot be measured.
`bench.codecs` starts it, with the libraries that numpy and PyTorch call limited to one thread.

Seconds are the CPU time of the whole process: those that one thread takes on an idle machine, without what
other programs take here, while a second thread would count. Memory is the growth of the resident memory's
peak over a first round, whoever allocates.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_nebula.bench.codec_peers import PIQUANT, TORCH, peer_of
from paddlenlp_nebula.bench.codecs import CodecPlan
from paddlenlp_nebula.bench.contenders import Contender, Own
from paddlenlp_nebula.bench.meters import forget_peak, memory
from paddlenlp_nebula.codec.codec import Float32Vector, Layout

__all__ = ["Round", "compare", "group_of", "main", "measure", "one_round", "vector_for"]

_SHIFT, _SHIFTS = 1024, 64


class Round(NamedTuple):
    """What one round took: CPU seconds, and bytes of all payloads."""

    encode_s: float
    add_s: float
    nbytes: int


def measure(plan: CodecPlan) -> Iterator[dict[str, Any]]:
    """``{"row": ...}`` and ``{"not_measured": ...}``, size by size and codec by codec."""
    source = np.random.default_rng(0).standard_normal(max(plan.parameters) + _SHIFT * _SHIFTS, dtype=np.float32)
    groups = [group_of(spec) for spec in dict.fromkeys(plan.specs)]
    for _, missing in groups:
        yield from ({"not_measured": entry} for entry in missing)
    for parameters in plan.parameters:
        for contenders, _ in groups:
            yield from ({"row": row} for row in compare(contenders, source, parameters, plan))


def group_of(spec: str) -> tuple[list[Contender], list[dict[str, str]]]:
    """A codec as by default; where there is a peer without feedback also like that; behind each its peer.

    Returns:
        What to measure side by side, and the names of peers that cannot be, with the reason.
    """
    own = [Own(spec)]
    if own[0].name in PIQUANT:
        own.append(Own(spec, error_feedback=False))
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    for codec in own:
        contenders.append(codec)
        try:
            peer = peer_of(codec.name, error_feedback=codec.error_feedback)
        except ImportError as error:
            missing[(PIQUANT | TORCH)[codec.name]] = f"{error}: pip install pypiquant torch"
        else:
            if peer is not None:
                contenders.append(peer)
    return contenders, [{"codec": name, "why": why} for name, why in missing.items()]


def compare(
    contenders: list[Contender], source: Float32Vector, parameters: int, plan: CodecPlan
) -> Iterator[dict[str, Any]]:
    """A row for each contender; their rounds, and copies of the same buffer, take turns, in another order each time.

    What ran just before leaves the caches warm or cold: in a fixed order always for the same ones.

    Args:
        contenders: all of them keep their states at the same time.
        source: some more elements than ``parameters``, so that each round encodes other numbers.
        parameters: how many to encode.
        plan: how often.
    """
    layouts = [contender.layouts(parameters) for contender in contenders]
    for contender, own in zip(contenders, layouts, strict=True):  # compiles, and loads what is loaded late
        contender.start(own[:1])
        one_round(contender, own[:1], source, np.zeros(own[0].numel, dtype=np.float32), 1)
    extra = [_extra_memory(*pair, source, parameters) for pair in zip(contenders, layouts, strict=True)]
    rounds: list[list[Round]] = [[] for _ in contenders]
    copies: list[float] = []
    out = np.zeros(parameters, dtype=np.float32)
    for contender, own in zip(contenders, layouts, strict=True):
        contender.start(own)
    start = time.perf_counter()
    entries = list(zip(contenders, layouts, rounds, strict=True))
    orders = random.Random(0)
    while len(copies) < plan.repetitions or time.perf_counter() - start < plan.least_s * len(contenders):
        number = len(copies) + 1
        vector = vector_for(number, source, parameters)
        for contender, own, taken in orders.sample(entries, len(entries)):
            taken.append(one_round(contender, own, vector, out, number))
        before = time.process_time()
        np.copyto(out, vector)
        copies.append(time.process_time() - before)
    for contender, taken, extra_bytes in zip(contenders, rounds, extra, strict=True):
        contender.start([])
        yield {
            "codec": contender.name,
            "error_feedback": contender.error_feedback,
            "parameters": parameters,
            "bytes_per_parameter": sum(each.nbytes for each in taken) / len(taken) / parameters,
            "encode_gb_s": _gb_s(parameters, min(each.encode_s for each in taken)),
            "decode_gb_s": _gb_s(parameters, min(each.add_s for each in taken)),
            "extra_memory_bytes": extra_bytes,
            "memcpy_gb_s": _gb_s(parameters, min(copies)),
            "repetitions": len(taken),
        }


def vector_for(number: int, source: Float32Vector, parameters: int) -> Float32Vector:
    """What round ``number`` encodes: another window of the source, so that no element is the same as the round before."""
    shift = number % _SHIFTS * _SHIFT
    return source[shift : shift + parameters]


def one_round(
    contender: Contender, layouts: list[Layout], vector: Float32Vector, out: Float32Vector, number: int
) -> Round:
    """Encode all buckets, then add them all to ``out``."""
    ends = np.cumsum([layout.numel for layout in layouts]).tolist()
    buckets = [slice(end - layout.numel, end) for end, layout in zip(ends, layouts, strict=True)]
    start = time.process_time()
    payloads = [contender.encode(vector[bucket], part, number) for part, bucket in enumerate(buckets)]
    encoded = time.process_time()
    for part, (bucket, payload) in enumerate(zip(buckets, payloads, strict=True)):
        contender.add(payload, part, out[bucket])
    return Round(encoded - start, time.process_time() - encoded, sum(map(contender.nbytes, payloads)))


def _extra_memory(contender: Contender, layouts: list[Layout], source: Float32Vector, parameters: int) -> int:
    """Bytes that a first round needs beside its input: state, payloads, sum, and whatever is allocated in between."""
    contender.start([])
    with suppress(AttributeError):  # glibc's: give back what is free, lest it be used again unseen
        ctypes.CDLL(None).malloc_trim(0)
    forget_peak()
    before = memory()["rss"]
    out = np.empty(parameters, dtype=np.float32)
    out.fill(0)  # zeros that nobody writes would not be resident
    contender.start(layouts)
    one_round(contender, layouts, vector_for(1, source, parameters), out, 1)
    extra = memory()["peak"] - before
    contender.start([])
    return extra


def _gb_s(parameters: int, seconds: float) -> float:
    return 4 * parameters / seconds / 1e9


def main() -> None:
    for entry in measure(CodecPlan.parse(sys.argv[1])):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
