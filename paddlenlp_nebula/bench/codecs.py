"""``nebula bench codecs``: bytes, speed and memory of codecs, next to their peers and to memcpy in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paddlenlp_nebula.bench.codec_targets import targets
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError

__all__ = ["PARAMETERS", "SPECS", "CodecPlan", "measure_codecs"]

SPECS = (
    "fp32",
    "bf16",
    "int8",
    "int4",
    "int2",
    "sign",
    "topk:64/4096,2bit",
    "topk:64/4096,fp16",
    "randomk:0.1",
    "randomk:0.1+topk:64/4096,4bit",
    "lowrank:4",
    "dgc:0.001",
)
PARAMETERS = (1_000_000, 16_000_000, 100_000_000)

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """A measurement.

    Attributes:
        specs: codecs, as for ``sync_codec``.
        parameters: sizes, in parameters.
        repetitions: rounds of each codec and size, at least; the fastest counts.
        least_s: seconds to go on for, at least, per codec and size.

    Raises:
        ConfigurationError: there is no such codec.
    """

    specs: tuple[str, ...] = SPECS
    parameters: tuple[int, ...] = PARAMETERS
    repetitions: int = 5
    least_s: float = 0.5

    def __post_init__(self) -> None:
        for spec in self.specs:
            codec_from_spec(spec)

    def text(self) -> str:
        """The plan as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> CodecPlan:
        """The plan in such an argument."""
        given = json.loads(text)
        return cls(**given | {name: tuple(given[name]) for name in ("specs", "parameters")})


def measure_codecs(plan: CodecPlan, when_known: Callable[[dict[str, Any]], None] = lambda row: None) -> dict[str, Any]:
    """Measure in a process of its own, on one thread.

    Args:
        plan: what to measure.
        when_known: called with each row.

    Returns:
        ``rows``: for each codec or peer and size ``codec``, ``error_feedback``, ``parameters``,
        ``bytes_per_parameter`` (mean over the rounds), ``encode_gb_s``, ``decode_gb_s`` and ``memcpy_gb_s`` (10^9
        bytes of float32 parameters per second of CPU time, the fastest of ``repetitions``; encoding includes
        error feedback, decoding is the weighted sum of a round), ``extra_memory_bytes`` (by which resident
        memory grows in a first round: state, payloads, sum and temporaries); ``not_measured``: ``codec`` and
        ``why``; ``targets``; ``load_average`` of the last minute, before and after.

    Raises:
        NebulaError: the process failed; with its last words.
    """
    load = [os.getloadavg()[0]]
    found: dict[str, list[dict[str, Any]]] = {"row": [], "not_measured": []}
    command = [sys.executable, "-m", "paddlenlp_nebula.bench.codec_rounds", plan.text()]
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=words, text=True, env={**os.environ, **_ONE_THREAD}
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                ((kind, entry),) = json.loads(line).items()
                found[kind].append(entry)
                if kind == "row":
                    when_known(entry)
        finally:
            process.kill()  # it has ended, unless this one was interrupted
        if process.wait() != 0:
            words.seek(0)
            last = words.read().decode(errors="replace").strip().splitlines() or ["no words"]
            raise NebulaError(f"measuring codecs failed after {len(found['row'])} rows: {last[-1]}")
    return {
        "rows": found["row"],
        "not_measured": found["not_measured"],
        "targets": targets(found["row"]),
        "load_average": [*load, os.getloadavg()[0]],
    }
