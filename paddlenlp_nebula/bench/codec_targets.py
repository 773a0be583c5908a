"""What the codecs are to reach, and whether rows of `nebula bench codecs` do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_nebula.bench.codec_peers import PIQUANT, TORCH
from paddlenlp_nebula.transport.channel import CHUNK_BYTES

__all__ = ["targets"]

_BYTES = {"int8": 1.05, "int4": 0.55, "topk:64/4096,2bit": 0.020}
_NOT_BELOW_PIQUANT = ("int8", "int4")
_TIMES_TORCH = 2.0
_MEMORY = 3.0

Rows = Sequence[dict[str, Any]]


def targets(rows: Rows) -> list[dict[str, Any]]:
    """``name``, ``value``, ``unit``, ``target``, ``met`` and ``at`` of each target.

    The value is the worst of all sizes, ``at`` says of which. ``met`` is None where rows are missing, and where
    ``target`` is empty, the figure being there for completeness.
    """
    found = []
    for codec, limit in _BYTES.items():
        values = {_size(row): row["bytes_per_parameter"] for row in rows if row["codec"] == codec}
        found.append(_figure(f"bytes per parameter, {codec}", values, "B", most=limit))
    for codec in _NOT_BELOW_PIQUANT:
        peer = PIQUANT[codec]
        for what, key, feedback in (
            ("encode", "encode_gb_s", False),
            ("decode", "decode_gb_s", False),
            ("encode with error feedback", "encode_gb_s", True),
        ):
            ratios = _ratios(rows, codec, peer, key, feedback)
            found.append(_figure(f"{codec} {what}, speed relative to {peer}", ratios, "x", least=1.0))
    for codec, peer in TORCH.items():
        encode, decode = (_ratios(rows, codec, peer, key, True) for key in ("encode_gb_s", "decode_gb_s"))
        name = f"{codec} {{}}, speed relative to {peer}"
        found.append(_figure(name.format("encode with error feedback"), encode, "x", least=_TIMES_TORCH))
        found.append(_figure(name.format("decode"), decode, "x"))
    peers = {**PIQUANT, **TORCH}.values()
    shares = {  # the chunk per peer, which is the link's, is allowed on top
        f"{row['codec']}, {_size(row)}": (row["extra_memory_bytes"] - CHUNK_BYTES) / (4 * row["parameters"])
        for row in rows
        if row["codec"] not in peers
    }
    name = "extra memory of any codec less one chunk, in sizes of the fp32 parameters"
    return [*found, _figure(name, shares, "x", most=_MEMORY)]


def _figure(
    name: str, values: dict[str, float], unit: str, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    """The worst of some values, which are to be at most ``most``, or at least ``least``."""
    worst = min if most is None else max
    at = worst(values, key=values.__getitem__, default=None)
    value = None if at is None else values[at]
    target, met = "", None
    if most is not None:
        target, met = f"<= {most:g}", None if value is None else value <= most
    elif least is not None:
        target, met = f">= {least:g}", None if value is None else value >= least
    return {"name": name, "value": value, "unit": unit, "target": target, "met": met, "at": at}


def _ratios(rows: Rows, codec: str, peer: str, key: str, error_feedback: bool) -> dict[str, float]:
    """Size -> how many times as fast as the peer."""
    own, other = (
        {_size(row): row[key] for row in rows if (row["codec"], row["error_feedback"]) == (name, error_feedback)}
        for name in (codec, peer)
    )
    return {size: speed / other[size] for size, speed in own.items() if size in other}


def _size(row: dict[str, Any]) -> str:
    return f"{row['parameters']} parameters"
