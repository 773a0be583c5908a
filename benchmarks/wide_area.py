"""A link over an emulated wide-area line, next to a plain socket and iperf3 on the same line."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from paddlenlp_nebula.bench.link import measure_link, messages_for
from paddlenlp_nebula.bench.plan import Plan
from tests.support.wan import Site, available, wide_area

__all__ = ["measure_line"]

_OMIT_S = 3.0  # TCP's slow start


def measure_line(rate_mbit: float, rtt_ms: float, seconds: float, repetitions: int) -> dict[str, Any]:
    """Payload rates of link, plain socket and iperf3, one direction and both; or why there are none.

    Args:
        rate_mbit: what each side can send and receive.
        rtt_ms: the round trip; 0 for a line without a delay.
        seconds: how long a copy takes at the line's rate.
        repetitions: copies of each kind.
    """
    line = {"rate_mbit": rate_mbit, "rtt_ms": rtt_ms, "seconds": seconds}
    if reason := available(delay=bool(rtt_ms)):
        return {**line, "unavailable": reason}
    with wide_area(rate_mbit=rate_mbit, rtt_ms=rtt_ms) as wan:
        west, east = wan.sites
        plan = Plan(
            messages=messages_for(rate_mbit * 1e6 / 8 * seconds / (1 << 20)),
            repetitions=repetitions,
            door=f"{west.address}:7000",
            socket=f"{west.address}:7001",
            omit_s=_OMIT_S if seconds > 2 * _OMIT_S else 0.0,
        )
        found = measure_link(plan, {site.name: site.command for site in wan.sites})
        iperf3 = _iperf3(west, east, max(1.0, seconds - _OMIT_S))
    for row in found["rates"]:
        for way in ("link", "socket"):
            row[f"{way}_mbit_s"] = 8 * row[f"{way}_mb_s"]
        row["iperf3_mbit_s"] = iperf3 and iperf3[row["directions"]]
        row["share_of_iperf3"] = iperf3 and row["link_mbit_s"] / row["iperf3_mbit_s"]
    return {**line, **found}


def _iperf3(west: Site, east: Site, seconds: float) -> dict[int, float] | None:
    """Mbit/s of payload, by directions; the slower one counts. None where iperf3 is not installed."""
    if shutil.which("iperf3") is None:
        return None
    common = ["iperf3", "-c", west.address, "-t", str(round(seconds)), "-O", str(round(_OMIT_S)), "-J"]
    found = {}
    for directions, options in ((1, ["-R"]), (2, ["--bidir"])):  # -R: from west to east, as the copies
        with west.popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            while "listening" not in server.stdout.readline():
                pass
            end = json.loads(east.run([*common, *options]).stdout)["end"]
            server.kill()
        ends = [end["sum_received"], *([end["sum_received_bidir_reverse"]] if directions == 2 else [])]
        found[directions] = min(e["bits_per_second"] for e in ends) / 1e6
    return found
