"""``nebula bench link``: what a link carries, next to a plain TCP socket in the same run.

Two processes, each with a courier as in training, copy the same bytes both ways in turn.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from paddlenlp_nebula.bench.plan import MESSAGE_BYTES, NAMES, Plan
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.transport.channel import CHUNK_BYTES, CHUNKS

__all__ = ["check_digests", "free_ports", "measure_link", "messages_for", "rates", "run_sides", "summarise"]

Place = Callable[[Sequence[str]], list[str]]
"""Turns a command into one that runs at a side's place, such as inside a network namespace."""


def messages_for(mib: float) -> int:
    """How many messages hold about so many MiB; at least one."""
    return max(1, round(mib * (1 << 20) / MESSAGE_BYTES))


def free_ports(host: str = "127.0.0.1") -> tuple[str, str]:
    """Two "host:port" that nothing listens on right now."""
    with socket.create_server((host, 0)) as one, socket.create_server((host, 0)) as two:
        return f"{host}:{one.getsockname()[1]}", f"{host}:{two.getsockname()[1]}"


def measure_link(plan: Plan, places: Mapping[str, Place] | None = None) -> dict[str, Any]:
    """Run both sides to their end and put together what they saw; see `summarise`.

    Args:
        plan: what to copy how often.
        places: where a side runs, by its name; by default here.

    Raises:
        NebulaError: a side failed; with its last words.
    """
    commands = {name: [sys.executable, "-m", "paddlenlp_nebula.bench.peer", name, plan.text()] for name in NAMES}
    return summarise(
        plan, run_sides({name: (places or {}).get(name, list)(command) for name, command in commands.items()})
    )


def run_sides(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Run the sides' commands to their end; side -> the JSON object that it printed.

    Raises:
        NebulaError: a side failed; with its last words.
    """
    with tempfile.TemporaryFile() as words:
        sides = {
            name: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, env=environment)
            for name, command in commands.items()
        }
        try:
            outputs = {name: side.communicate()[0] for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.kill()
                side.wait()
        failed = [name for name, side in sides.items() if side.returncode != 0]
        if failed:
            words.seek(0)
            last = words.read().decode(errors="replace").strip().splitlines() or ["no words"]
            raise NebulaError(f"measuring the link failed on the side {' and '.join(failed)}: {last[-1]}")
    return {name: json.loads(output) for name, output in outputs.items()}


def summarise(plan: Plan, seen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a measurement.

    Args:
        plan: what was copied.
        seen: side -> what it printed.

    Returns:
        ``rates``: for 1 and 2 directions the medians over the repetitions of ``link_mb_s`` and ``socket_mb_s``
        (payload per direction, 10^6 bytes per second), their ratio ``share``, and CPU seconds per GB of payload
        by process; the first direction's also at the top, with ``rtt_ms`` and ``overhead_percent``.

    Raises:
        NebulaError: a copy did not arrive as it was sent.
    """
    check_digests(seen)
    payload = plan.messages * MESSAGE_BYTES
    rows = rates(plan, seen, ("link", "socket"))
    sent = sum(s["framed_bytes_sent"] for s in seen[NAMES[0]]["samples"] if s["way"] == "link")
    paid = payload * 2 * plan.repetitions
    return {
        **{key: rows[0][key] for key in ("link_mb_s", "socket_mb_s", "share")},
        "rtt_ms": seen[NAMES[0]]["rtt_ms"]["link"],
        "socket_rtt_ms": seen[NAMES[0]]["rtt_ms"]["socket"],
        "overhead_percent": 100 * (sent - paid) / paid,
        "rates": rows,
        "payload_bytes": payload,
        "message_bytes": MESSAGE_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "chunks": CHUNKS,
        "repetitions": plan.repetitions,
        "omit_s": plan.omit_s,
    }


def check_digests(seen: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare what arrived with what was sent.

    Raises:
        NebulaError: a copy did not arrive as it was sent.
    """
    for name, other in (NAMES, NAMES[::-1]):
        for sample in seen[name]["samples"]:
            if sample["digest"] not in (None, seen[other]["sent_digest"]):
                raise NebulaError(f"what {other} sent over the {sample['way']} must arrive at {name} as it was sent")


def rates(plan: Plan, seen: Mapping[str, Mapping[str, Any]], ways: tuple[str, str]) -> list[dict[str, Any]]:
    """What two ways of copying reached, for 1 and for 2 directions; ``share`` is the first's rate in the second's."""
    return [_rates(plan, seen, ways, directions) for directions in (1, 2)]


def _rates(plan: Plan, seen: Mapping[str, Mapping[str, Any]], ways: tuple[str, str], directions: int) -> dict[str, Any]:
    row: dict[str, Any] = {"directions": directions}
    payload = plan.messages * MESSAGE_BYTES
    for way in ways:
        runs = [
            [
                s
                for side in seen.values()
                for s in side["samples"]
                if (s["way"], s["directions"], s["repetition"]) == (way, directions, repetition)
            ]
            for repetition in range(plan.repetitions)
        ]
        every = [_bytes_s(run, payload, plan.omit_s) / 1e6 for run in runs]
        row[f"{way}_mb_s"] = median(every)
        row[f"{way}_mb_s_every"] = every
        gigabytes = payload * directions * plan.repetitions / 1e9
        used = {
            name: [s["cpu_s"] for s in seen[name]["samples"] if (s["way"], s["directions"]) == (way, directions)]
            for name in NAMES
        }
        row[f"{way}_cpu_s_per_gb"] = {
            f"{name} {role}": sum(seconds[role] for seconds in used[name]) / gigabytes
            for name in NAMES
            for role in used[name][0]
        }
        sent = median(sum(s["device_bytes_sent"] for s in run[:1]) for run in runs)
        row[f"{way}_device_bytes_per_payload_byte"] = sent / payload
    row["share"] = row[f"{ways[0]}_mb_s"] / row[f"{ways[1]}_mb_s"]
    return row


def _bytes_s(run: Sequence[Mapping[str, Any]], payload: int, omit_s: float) -> float:
    """Payload per second and direction of one copy: the slower side's."""
    steady = [s["steady_bytes_s"] for s in run if s["steady_bytes_s"] is not None]
    if omit_s and steady:
        return float(min(steady))
    return payload / max(float(s["seconds"]) for s in run)
