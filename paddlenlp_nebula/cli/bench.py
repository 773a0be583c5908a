"""``nebula bench``: measurements of this machine's links."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paddlenlp_nebula.bench.facts import facts
from paddlenlp_nebula.bench.link import free_ports, measure_link, messages_for
from paddlenlp_nebula.bench.plan import Plan

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure links."""


@bench.command()
@click.option("--mib", type=click.FloatRange(min=1), default=256, show_default=True, help="MiB per copy and direction.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Copies of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--json-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the JSON there as well."
)
def link(mib: float, repetitions: int, as_json: bool, json_file: Path | None) -> None:
    """What a link (courier, MPI, frames, checksums) carries between two processes of this machine.

    A plain TCP socket copies the same bytes in turn with it, so that the machine's speed cancels out.
    """
    door, plain = free_ports()
    found = measure_link(Plan(messages_for(mib), repetitions, door, plain))
    result = {
        **found,
        **facts(["nebula", "bench", *sys.argv[sys.argv.index("link") :]] if "link" in sys.argv else None),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=f"{result['payload_bytes'] / 1e6:.0f} MB per copy and direction, median of {result['repetitions']}",
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
