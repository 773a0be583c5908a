"""The ledger: counters add up, survive a resume, and are written so that a reader never sees half of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_nebula.ledger.ledger import SCHEMA, Ledger, Round

REQUIRED = [
    "schema",
    "cluster",
    "members",
    "strategy",
    "codec",
    "sync_every",
    "parameters_selected",
    "rounds",
    "steps",
    "tokens",
    "bytes_sent",
    "bytes_received",
    "bytes_dense_fp32_every_step",
    "reduction",
    "seconds_compute",
    "seconds_exposed",
    "utilisation",
    "link_mbit_s",
    "rtt_ms",
    "parameter_digest",
    "train_loss",
    "eval_loss",
    "degradations",
    "per_round",
]

FACTS = {
    "cluster": "amber",
    "clusters": ["amber", "birch"],
    "strategy": "every_step",
    "codec": "fp32",
    "sync_every": 1,
    "parameters_selected": 1000,
    "parameters_total": 5000,
}


def entry(**changes: Any) -> Round:
    fields = {
        "round": 1,
        "step": 1,
        "members": 2,
        "weight": 0.5,
        "bytes_sent": 4000,
        "bytes_received": 4000,
        "seconds_exposed": 0.5,
        "seconds_waiting": 0.25,
        "digest": "ab",
        "update_norm": None,
    }
    return Round(**{**fields, **changes})


def test_the_report_has_every_field_from_the_start(tmp_path: Path) -> None:
    report = Ledger(dict(FACTS)).report()
    assert set(REQUIRED) <= set(report)
    assert report["schema"] == SCHEMA
    assert report["utilisation"] is report["reduction"] is report["rtt_ms"] is None
    json.dumps(report, allow_nan=False)


def test_bytes_add_up_by_kind() -> None:
    ledger = Ledger()
    ledger.count_bytes({"BUCKET": 100, "END": 44}, {"BUCKET": 90})
    ledger.count_bytes({"BUCKET": 1}, {"NOTE": 7})
    assert ledger.bytes_by_kind == {"BUCKET": [101, 90], "END": [44, 0], "NOTE": [0, 7]}
    assert (ledger.bytes_sent, ledger.bytes_received) == (145, 97)


def test_rounds_add_up() -> None:
    ledger = Ledger()
    ledger.seconds_compute = 3.0
    ledger.record(entry(seconds_exposed=0.5, bytes_received=1_000_000))
    ledger.record(entry(seconds_exposed=0.5, bytes_received=500_000))
    ledger.record(entry(seconds_exposed=0.0, members=1, bytes_received=0))
    assert ledger.rounds == 3
    assert ledger.utilisation == pytest.approx(0.75)


@pytest.mark.parametrize(("clusters", "per_parameter"), [(1, 0), (2, 4), (3, 16 / 3), (4, 6)])
def test_the_dense_exchange_it_is_compared_with(clusters: int, per_parameter: float) -> None:
    ledger = Ledger({**FACTS, "clusters": list("abcd")[:clusters]})
    ledger.steps, ledger.bytes_sent = 10, 1000
    report = ledger.report()
    assert report["bytes_dense_fp32_every_step"] == round(per_parameter * 1000 * 10)
    assert report["bytes_full_model_fp32_every_step"] == round(per_parameter * 5000 * 10)
    assert report["reduction"] == report["bytes_dense_fp32_every_step"] / 1000


def test_a_resumed_run_goes_on_counting() -> None:
    first = Ledger(dict(FACTS))
    first.count_bytes({"BUCKET": 100}, {"BUCKET": 90})
    first.record(entry())
    first.steps, first.samples, first.tokens = 5, 80, 640
    first.degrade("cluster 'birch' was lost")
    saved = json.loads(json.dumps(first.state()))
    second = Ledger(dict(FACTS))
    second.restore(saved)
    assert second.state() == first.state()
    second.count_bytes({"BUCKET": 1}, {})
    second.degrade("again")
    assert (second.bytes_sent, second.bytes_by_kind["BUCKET"], second.rounds) == (101, [101, 90], 1)
    assert len(second.degradations) == 2


def test_a_state_is_a_snapshot() -> None:
    ledger = Ledger()
    ledger.count_bytes({"BUCKET": 100}, {})
    state = ledger.state()
    restored = Ledger()
    restored.restore(state)
    for one in (ledger, restored):
        one.count_bytes({"BUCKET": 1}, {"NOTE": 1})
        one.degrade("something")
    assert state["bytes_by_kind"] == {"BUCKET": [100, 0]}
    assert state["degradations"] == []


def test_an_older_state_may_lack_something() -> None:
    ledger = Ledger()
    ledger.restore({"rounds": 3, "unknown": 1})
    assert (ledger.rounds, ledger.steps) == (3, 0)
    assert not hasattr(ledger, "unknown")


def test_the_loss_curve_goes_on_after_a_resume_and_thins_out_when_full() -> None:
    first = Ledger()
    first.note_loss(1, 2.5)
    state = json.loads(json.dumps(first.state()))
    ledger = Ledger()
    ledger.restore(state)
    for step in range(2, 5001):
        ledger.note_loss(step, 1 / step)
    losses = ledger.report()["losses"]
    assert 250 <= len(losses) <= 500
    assert losses[0] == [1, 2.5]
    assert losses[-1][0] > 4900
    assert [step for step, _ in losses] == sorted({step for step, _ in losses})
    assert ledger.train_loss == 1 / 5000


def test_per_round_does_not_grow_without_end() -> None:
    ledger = Ledger()
    for number in range(1, 1502):
        ledger.record(entry(round=number))
    rounds = ledger.report()["per_round"]
    assert (len(rounds), rounds[0]["round"], rounds[-1]["round"]) == (1000, 502, 1501)
    assert ledger.rounds == 1501


def test_the_report_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "nebula_report.json"
    ledger = Ledger(dict(FACTS))
    ledger.write(path)
    ledger.record(entry())
    ledger.write(path)
    report = json.loads(path.read_text())
    assert report["per_round"] == [
        {
            "round": 1,
            "step": 1,
            "members": 2,
            "weight": 0.5,
            "bytes_sent": 4000,
            "bytes_received": 4000,
            "seconds_exposed": 0.5,
            "seconds_waiting": 0.25,
            "digest": "ab",
            "update_norm": None,
        }
    ]
    assert [file.name for file in path.parent.iterdir()] == ["nebula_report.json"]


def test_what_cannot_be_written_leaves_the_last_report_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, path = Ledger(facts=FACTS), tmp_path / "report.json"
    ledger.write(path)
    before = path.read_text()

    def full(self: Path, text: str) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        ledger.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == before


def test_what_was_noted_before_the_checkpoint_was_read_is_kept() -> None:
    first = Ledger()
    first.degrade("the line was cut")
    second = Ledger()
    second.degrade("the run has begun without this cluster")
    second.restore(first.state())
    assert second.degradations == ["the line was cut", "the run has begun without this cluster"]
    assert first.degradations == ["the line was cut"]
