"""Reports are JSON for every reader, whatever numbers a training has come to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.ledger.plots import loss_figure
from paddlenlp_nebula.ledger.strict_json import json_text

REPORT: dict[str, Any] = {"schema": 1, "losses": [[1, 2.5], [2, 1e300]], "metrics": {"a": None, "b": True}, "c": "NaN"}


def strict(text: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_finite_reports_are_as_they_are() -> None:
    assert strict(json_text(REPORT)) == REPORT


def test_what_is_not_finite_is_null_and_named() -> None:
    report = {
        **REPORT,
        "losses": [[1, math.nan]],
        "metrics": {"eval_ppl": math.inf, "x": (1.0, -math.inf)},
        "c": math.nan,
    }
    assert strict(json_text(report)) == {
        "schema": 1,
        "losses": [[1, None]],
        "metrics": {"eval_ppl": None, "x": [1.0, None]},
        "c": None,
        "not_finite": {"losses.0.1": "nan", "metrics.eval_ppl": "inf", "metrics.x.1": "-inf", "c": "nan"},
    }
    assert math.isnan(report["c"])


def test_the_report_of_a_training_that_diverged(tmp_path: Path) -> None:
    ledger = Ledger({"cluster": "west"}, status="training")
    ledger.note_loss(1, 2.0)
    ledger.note_loss(2, math.inf)
    ledger.metrics = {"eval_loss": math.nan}
    ledger.write(tmp_path / "report.json")
    report = strict((tmp_path / "report.json").read_text())
    assert report["losses"] == [[1, 2.0], [2, None]]
    assert report["not_finite"] == {"train_loss": "inf", "losses.1.1": "inf", "metrics.eval_loss": "nan"}
    (axes,) = loss_figure({"west": report}).axes
    assert [line.get_label() for line in axes.lines] == ["west  2.000"]
    assert list(axes.lines[0].get_xdata()) == [1]
