"""The plot of the losses: what is on it, at every stage of a run."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.ledger.plots import loss_figure


def report(name: str, losses: list[list[float]], **counters: Any) -> dict[str, Any]:
    ledger = Ledger({"cluster": name, "max_steps": 90}, status="training")
    for step, loss in losses:
        ledger.note_loss(int(step), loss)
    for key, value in counters.items():
        setattr(ledger, key, value)
    return ledger.report()


@pytest.mark.parametrize("reports", [{}, {"west": {}, "east": {}}])
def test_before_there_is_anything_to_plot(reports: dict[str, Any]) -> None:
    (axes,) = loss_figure(reports).axes
    assert not axes.lines
    assert axes.get_title(loc="left") == "the clusters start and meet..."


def test_one_cluster_has_no_point_yet() -> None:
    reports = {"west": report("west", [[10, 2.0]], steps=10), "east": report("east", [], steps=9)}
    (axes,) = loss_figure(reports).axes
    assert [line.get_label() for line in axes.lines] == ["west  2.000"]


def test_curves_counters_and_ends_of_two_clusters() -> None:
    reports = {
        "west": report("west", [[10, 2.0], [20, 1.0]], steps=21, bytes_sent=2_000_000, seconds_compute=9.0),
        "east": report("east", [[10, 2.1], [20, 1.1]], steps=20, bytes_sent=1_000_000, seconds_compute=3.0),
    }
    reports["east"] |= {"status": "done", "utilisation": 0.75}
    (axes,) = loss_figure(reports).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[2.0, 1.0], [2.1, 1.1]]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 2
    assert axes.get_xlim() == (0, 90)
    assert axes.get_title(loc="left") == "step 20 of 90 · 3.0 MB sent · busy training 75% · east: done"
