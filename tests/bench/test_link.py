"""`nebula bench link`: its figures are there and make sense; never how fast this machine is today."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from paddlenlp_nebula.bench.copies import Arrivals
from paddlenlp_nebula.bench.link import messages_for, summarise
from paddlenlp_nebula.bench.plan import MESSAGE_BYTES, Plan
from paddlenlp_nebula.cli.main import main
from paddlenlp_nebula.errors import NebulaError

PLAN = Plan(messages=2, repetitions=1, door="d:1", socket="s:1")


def seen(digest: int = 7) -> dict:
    """What two sides print that took 1 s through the socket and 2 s over the link."""
    samples = [
        {
            "way": way,
            "directions": directions,
            "repetition": 0,
            "seconds": seconds,
            "steady_bytes_s": None,
            "cpu_s": {"leader": 1.0, "courier": 0.5},
            "device_bytes_sent": 2 * MESSAGE_BYTES,
            "framed_bytes_sent": 2 * (MESSAGE_BYTES + 44) if way == "link" else 0,
            "digest": digest,
        }
        for way, seconds in (("socket", 1.0), ("link", 2.0))
        for directions in (1, 2)
    ]
    side = {"rtt_ms": {"link": 2.0, "socket": 1.0}, "samples": samples, "sent_digest": 7}
    return {"west": side, "east": side}


def test_a_message_is_a_bucket_of_fp32_gradients() -> None:
    from paddlenlp_nebula.buckets import BUCKET_NUMEL

    assert MESSAGE_BYTES == 4 * BUCKET_NUMEL
    assert messages_for(0.1) == 1
    assert messages_for(63) == 64


def test_the_plan_travels_as_text() -> None:
    assert Plan.parse(PLAN.text()) == PLAN


def test_figures_are_rates_per_direction_and_their_ratio() -> None:
    found = summarise(PLAN, seen())
    assert found["socket_mb_s"] == pytest.approx(2 * MESSAGE_BYTES / 1e6)
    assert found["share"] == pytest.approx(0.5)
    assert found["overhead_percent"] == pytest.approx(100 * 44 / MESSAGE_BYTES)
    one, both = found["rates"]
    assert one["link_cpu_s_per_gb"]["west courier"] == pytest.approx(2 * both["link_cpu_s_per_gb"]["west courier"])


def test_bytes_that_arrive_changed_are_an_error() -> None:
    with pytest.raises(NebulaError, match="must arrive"):
        summarise(PLAN, seen(digest=8))


def test_the_steady_rate_leaves_out_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("paddlenlp_nebula.bench.copies.time.perf_counter", lambda: next(now))
    arrivals = Arrivals()
    for total in (10, 110, 210):
        arrivals.note(total)
    assert arrivals.rate(0.5) == pytest.approx(100)
    assert arrivals.rate(0.0) == pytest.approx(70)
    assert arrivals.rate(9.0) is None


@pytest.mark.mpi
def test_the_command_measures_a_real_link(tmp_path) -> None:
    file = tmp_path / "link.json"
    outcome = CliRunner().invoke(
        main, ["bench", "link", "--mib", "3", "--repetitions", "1", "--json", "--json-file", str(file)]
    )
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(file.read_text())
    assert json.loads(outcome.stdout) == result
    assert outcome.stderr.startswith("copying 3 MiB 1 times")
    keys = ("link_mb_s", "socket_mb_s", "share", "rtt_ms", "overhead_percent", "chunk_bytes", "cpu_count")
    assert all(result[key] > 0 for key in keys)
    assert result["overhead_percent"] < 0.01
    assert {"command", "date", "versions"} <= result.keys()
    assert [row["directions"] for row in result["rates"]] == [1, 2]


@pytest.mark.mpi
def test_the_command_shows_a_table() -> None:
    outcome = CliRunner().invoke(main, ["bench", "link", "--mib", "1", "--repetitions", "1"])
    assert outcome.exit_code == 0, outcome.output
    assert "link MB/s" in outcome.output
    assert "round trip" in outcome.output
