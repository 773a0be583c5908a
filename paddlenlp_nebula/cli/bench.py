"""``nebula bench``: measurements of this machine's links and codecs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paddlenlp_nebula.bench.codecs import PARAMETERS, SPECS, CodecPlan, measure_codecs
from paddlenlp_nebula.bench.facts import facts
from paddlenlp_nebula.bench.link import free_ports, measure_link, messages_for
from paddlenlp_nebula.bench.plan import NAMES, Plan
from paddlenlp_nebula.security.throwaway import throw_away, throwaway_folder

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure links and codecs."""


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_json_file = click.option(
    "--json-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the JSON there as well."
)


@bench.command(short_help="What a link carries between two processes of this machine.")
@click.option("--mib", type=click.FloatRange(min=1), default=256, show_default=True, help="MiB per copy and direction.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Copies of each kind.")
@click.option(
    "--security",
    type=click.Choice(["tls", "none"]),
    default="tls",
    show_default=True,
    help="As sync_security; the certificates are made for the occasion.",
)
@_as_json
@_json_file
def link(mib: float, repetitions: int, security: str, as_json: bool, json_file: Path | None) -> None:
    """What a link (courier, MPI, TLS, frames, checksums) carries between two processes of this machine.

    A plain TCP socket copies the same bytes in turn with it, so that the machine's speed cancels out.
    """
    click.echo(f"copying {mib:g} MiB {repetitions} times of each kind, which can take a minute...", err=True)
    door, plain = free_ports()
    with throwaway_folder() as folder:
        if security == "tls":
            throw_away(NAMES, folder)
        certificates = str(folder) if security == "tls" else ""
        found = measure_link(Plan(messages_for(mib), repetitions, door, plain, certificates=certificates))
    result = _complete("link", {"security": security, **found}, as_json, json_file)
    if not as_json:
        _show(result)


@bench.command(short_help="Bytes, speed and memory of codecs on one thread.")
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option(
    "--parameters",
    type=click.IntRange(min=1),
    multiple=True,
    help=f"Parameters to encode; may be repeated.  [default: {', '.join(map(str, PARAMETERS))}]",
)
@click.option(
    "--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds of each, at least."
)
@_as_json
@_json_file
def codecs(
    specs: tuple[str, ...], parameters: tuple[int, ...], repetitions: int, as_json: bool, json_file: Path | None
) -> None:
    """Bytes, speed and memory of codecs on one thread, SPEC being as for sync_codec, or of the usual ones.

    Lossy codecs have error feedback, as by default. memcpy, pypiquant and PyTorch (pip install
    pypiquant torch) work on the same numbers in the same run.
    """
    plan = CodecPlan(specs or SPECS, parameters or PARAMETERS, repetitions)
    if not as_json:
        click.echo(_ROW.format("codec", "feedback", "parameters", "bytes", "encode", "decode", "memcpy", "memory"))
        click.echo(_ROW.format("", "", "", "per par.", "GB/s", "GB/s", "GB/s", "x fp32"))
    else:
        click.echo("measuring, which can take minutes...", err=True)
    found = measure_codecs(plan, (lambda row: None) if as_json else _show_row)
    result = _complete("codecs", found, as_json, json_file)
    if not as_json:
        for entry in result["not_measured"]:
            click.echo(f"{entry['codec']}: not measured, {entry['why']}")
        _show_targets(result["targets"])


_ROW = "{:32} {:8} {:>11} {:>8} {:>7} {:>7} {:>7} {:>7}"


def _show_row(row: dict[str, Any]) -> None:
    speeds = (row[key] for key in ("encode_gb_s", "decode_gb_s", "memcpy_gb_s"))
    click.echo(
        _ROW.format(
            row["codec"],
            "yes" if row["error_feedback"] else "no",
            f"{row['parameters']:,}",
            f"{row['bytes_per_parameter']:.4f}",
            *("> 100" if speed > 100 else f"{speed:.2f}" for speed in speeds),  # fp32 copies nothing
            f"{row['extra_memory_bytes'] / (4 * row['parameters']):.2f}",
        )
    )


def _show_targets(targets: list[dict[str, Any]]) -> None:
    """Those of which anything was measured, at their worst size."""
    for entry in targets:
        if entry["value"] is not None:
            verdict = {True: "met", False: "NOT MET", None: ""}[entry["met"]]
            click.echo(f"{entry['name']}: {entry['value']:.4g} {entry['unit']} {entry['target']} {verdict}".rstrip())


def _complete(command: str, found: dict[str, Any], as_json: bool, json_file: Path | None) -> dict[str, Any]:
    """A measurement with its circumstances, written and printed if asked for."""
    words = ["nebula", "bench", *sys.argv[sys.argv.index(command) :]] if command in sys.argv else None
    result = {**found, **facts(words)}
    text = json.dumps(result, indent=1)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if as_json:
        click.echo(text)
    return result


def _show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=f"security: {result['security']}; {result['payload_bytes'] / 1e6:.0f} MB per copy and direction, median of "
        f"{result['repetitions']}",
        title_justify="left",
    )
    for column in ("", "link MB/s", "socket MB/s", "share", "CPU s/GB link", "CPU s/GB socket"):
        table.add_column(column, justify="right" if column else "left")
    for row in result["rates"]:
        table.add_row(
            "one direction" if row["directions"] == 1 else "both, each",
            f"{row['link_mb_s']:.0f}",
            f"{row['socket_mb_s']:.0f}",
            f"{row['share']:.1%}",
            f"{sum(row['link_cpu_s_per_gb'].values()):.2f}",
            f"{sum(row['socket_cpu_s_per_gb'].values()):.2f}",
        )
    console.print(table, highlight=False)
    console.print(
        f"round trip {result['rtt_ms']:.2f} ms (socket {result['socket_rtt_ms']:.2f} ms), headers "
        f"{result['overhead_percent']:.3f} % of the payload, {result['cpu_count']} cores",
        highlight=False,
    )
