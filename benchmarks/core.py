"""The core's figures: bytes per parameter, memory, seconds per round, and what a link carries.

    python benchmarks/core.py                    # everything, about eight minutes on two cores
    python benchmarks/core.py --tiny --output X  # the same in seconds, for tests: its figures mean nothing

Without root there are no emulated lines, and no private network whose counters are only ours; what is left
out says why in its row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bare_mpi import measure_bare_mpi  # noqa: E402
from benchmarks.wide_area import measure_line  # noqa: E402
from paddlenlp_nebula.bench.facts import facts  # noqa: E402
from paddlenlp_nebula.bench.link import free_ports, measure_link, messages_for  # noqa: E402
from paddlenlp_nebula.bench.plan import NAMES, Plan  # noqa: E402
from tests.support.wan import available, wide_area  # noqa: E402

FULL = {"parameters": 30_000_000, "rounds": 5, "mib": 256, "repetitions": 5, "line_repetitions": 2}
TINY = {"parameters": 300_000, "rounds": 2, "mib": 4, "repetitions": 1, "line_repetitions": 1}
LINES = (  # Mbit/s, ms of round trip, seconds per copy; where the processor becomes the limit a delay would, too
    (100.0, 50.0, 15.0),
    (1000.0, 20.0, 4.0),
    (2500.0, 0.0, 1.0),
    (5000.0, 0.0, 0.5),
    (10000.0, 0.0, 0.25),
)
TINY_LINES = tuple((rate, rtt, 30 / rate) for rate, rtt, _ in (*LINES[:2], LINES[-1]))
WAYS = ("one direction", "both")
MIB = 1 << 20


def exchange(settings: dict[str, Any]) -> dict[str, Any]:
    """Run `exchange.py` on two clusters, in network namespaces of their own where possible; cluster -> its output."""
    command = [sys.executable, str(ROOT / "benchmarks" / "exchange.py")]
    if available() is not None:
        door = free_ports()[0]
        return _outputs({name: [*command, name, json.dumps({**settings, "rendezvous": door})] for name in NAMES})
    with wide_area() as wan:
        door = f"{wan.sites[0].address}:7000"
        return _outputs(
            {
                site.name: site.command([*command, site.name, json.dumps({**settings, "rendezvous": door})])
                for site in wan.sites
            }
        )


def _outputs(commands: dict[str, list[str]]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as log:
        running = {
            name: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) for name, command in commands.items()
        }
        outputs = {name: process.communicate()[0] for name, process in running.items()}
        if any(process.returncode for process in running.values()):
            log.seek(0)
            raise SystemExit(log.read().decode(errors="replace"))
    return {name: json.loads(output.decode().splitlines()[-1]) for name, output in outputs.items()}


def figure(name: str, value: float | None, unit: str, target: str, met: bool | None) -> dict[str, Any]:
    """A figure of the result; ``met`` is None where there is nothing to meet, or nothing was measured."""
    return {"name": name, "value": value, "unit": unit, "target": target, "met": met}


def dense(codec: str, sizes: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A dense exchange: its row, and its figures."""
    seen = exchange({"parameters": sizes["parameters"], "rounds": sizes["rounds"], "codec": codec})
    row = {"what": f"dense exchange, {codec}", **_row(seen)}
    limit = {"fp32": 4.04, "bf16": 2.02}[codec]
    per_parameter = row["bytes_per_parameter"]
    figures = [
        figure(
            f"bytes per parameter and direction, {codec}", per_parameter, "B", f"<= {limit}", per_parameter <= limit
        ),
        figure(
            f"the same on the network devices, {codec}",
            row["device_bytes_per_parameter"],
            "B",
            f"<= {limit}",
            None if row["private_network"] is False else row["device_bytes_per_parameter"] <= limit,
        ),
    ]
    if codec == "fp32":
        allowed = 3 * 4 * row["parameters"] + MIB
        extra = row["leader_extra_bytes"]
        figures += [
            figure(
                "memory of the leader for the exchange, in sizes of the fp32 parameters",
                extra / (4 * row["parameters"]),
                "x",
                "<= 3 (and one chunk per peer)",
                extra <= allowed,
            ),
            figure("memory of a courier", row["courier_private_bytes"] / MIB, "MiB", "", None),
            figure("seconds per round", row["seconds"], "s", "", None),
            figure("wire time of a round at 100 Mbit/s", row["wire_seconds_at_100_mbit_s"], "s", "", None),
        ]
    return row, figures


def _row(seen: dict[str, Any]) -> dict[str, Any]:
    parameters = seen[NAMES[0]]["parameters"]
    if len({side["digest"] for side in seen.values()}) != 1:
        raise SystemExit("the clusters' parameters differ after the exchange")
    rounds = [entry for side in seen.values() for entry in side["rounds"]]
    per_side = [side["rounds"] for side in seen.values()]
    slowest = [max(pair, key=lambda entry: entry["seconds"]) for pair in zip(*per_side, strict=True)]
    seconds = median(entry["seconds"] for entry in slowest)
    typical = min(slowest, key=lambda entry: abs(entry["seconds"] - seconds))
    sent = max(entry["bytes_sent"] for entry in rounds)
    return {
        "parameters": parameters,
        "rounds": len(slowest),
        "private_network": available() is None,
        "bytes_per_parameter": sent / parameters,
        "device_bytes_per_parameter": max(entry["device_sent"] for entry in rounds) / parameters,
        "leader_extra_bytes": max(max(s["start_peak"], s["rounds_peak"]) - s["before"]["rss"] for s in seen.values()),
        "leader_extra_bytes_at_the_start": max(s["start_peak"] - s["before"]["rss"] for s in seen.values()),
        "leader_extra_bytes_in_rounds": max(s["rounds_peak"] - s["before"]["rss"] for s in seen.values()),
        "courier_private_bytes": max(s["courier"]["peak"] - s["courier"]["shared"] for s in seen.values()),
        "shared_chunks_bytes": max(s["shared"] for s in seen.values()),
        "seconds": seconds,
        "seconds_by_phase": typical["phases"],
        "cpu_seconds_by_phase": typical["cpu_phases"],
        "wire_seconds_at_100_mbit_s": 8 * sent / 100e6,
    }


def lora(sizes: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A LoRA run's bytes on the wire, from start to end, against the adapters'."""
    seen = exchange({"lora_rank": 8, "rounds": 4 * sizes["rounds"], "codec": "fp32"})
    report = seen[NAMES[1]]["report"]  # the second cluster: the first also hands out the initial parameters
    adapters = 4 * seen[NAMES[1]]["parameters"] * report["rounds"]
    excess = 100 * (report["bytes_sent"] - adapters) / adapters
    row = {"what": "LoRA run", **_row(seen), "adapter_bytes": adapters, "bytes_sent": report["bytes_sent"]}
    return row, [figure("LoRA run: bytes sent beyond the adapters", excess, "%", "<= 2", abs(excess) <= 2)]


def loopback_link(sizes: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`nebula bench link`, and what no link over MPI could do without (docs/adr/008-loopback-share.md)."""
    found = measure_link(Plan(messages_for(sizes["mib"]), sizes["repetitions"], *free_ports()))
    bare = measure_bare_mpi(Plan(messages_for(sizes["mib"]), sizes["repetitions"], *free_ports()))
    figures = []
    for row, bare_row, what in zip(found["rates"], bare["rates"], WAYS, strict=True):
        share, cost, least = row["share"], sum(row["link_cpu_s_per_gb"].values()), bare_row["least_cpu_s_per_gb"]
        figures += [
            figure(f"link on loopback, {what}, share of a plain socket", 100 * share, "%", ">= 95", share >= 0.95),
            figure(f"link on loopback, {what}, processor time", cost, "s/GB", "", None),
            figure(
                f"link on loopback, {what}, against the least that a link can cost",
                cost / least,
                "x",
                "<= 1.5",
                cost <= 1.5 * least,
            ),
            figure(f"bare MPI on loopback, {what}, share of a plain socket", 100 * bare_row["share"], "%", "", None),
            figure(f"at most possible for a link, {what}", 100 * bare_row["bound_share"], "%", "", None),
        ]
    overhead = found["overhead_percent"]
    figures.append(figure("framing overhead", overhead, "%", "<= 1", overhead <= 1))
    return {"what": "link, loopback", **found, "bare_mpi": bare}, figures


def line_link(
    rate_mbit: float, rtt_ms: float, seconds: float, sizes: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The link over an emulated line."""
    name = f"link at {rate_mbit:g} Mbit/s, {rtt_ms:g} ms"
    found = measure_line(rate_mbit, rtt_ms, seconds, sizes["line_repetitions"])
    figures = []
    for row, what in zip(found.get("rates", ({}, {})), WAYS, strict=True):
        for key, other in (("share", "a plain socket"), ("share_of_iperf3", "iperf3")):
            share = row.get(key)
            value, met = (None, None) if share is None else (100 * share, share >= 0.95)
            figures.append(figure(f"{name}, {what}, share of {other}", value, "%", ">= 95", met))
    return {"what": name, **found}, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for tests")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "core.json")
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    parts = [
        lambda: dense("fp32", sizes),
        lambda: dense("bf16", sizes),
        lambda: lora(sizes),
        lambda: loopback_link(sizes),
        *(lambda line=line: line_link(*line, sizes) for line in (TINY_LINES if options.tiny else LINES)),
    ]
    result: dict[str, Any] = {**facts(["python", "benchmarks/core.py", *sys.argv[1:]]), "figures": [], "rows": []}
    for part in parts:
        row, figures = part()
        result["rows"].append(row)
        result["figures"] += figures
        for entry in figures:
            verdict = {True: "met", False: "NOT MET", None: ""}[entry["met"]]
            value = "-" if entry["value"] is None else f"{entry['value']:.4g}"
            print(f"{entry['name']:70} {value:>8} {entry['unit']:4} {entry['target']:10} {verdict}", flush=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")  # after each part: a late failure loses little


if __name__ == "__main__":
    main()
