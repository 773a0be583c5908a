"""benchmarks/quality at toy size: rows, gaps, resuming; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.plan import Run, searched, work
from benchmarks.quality.results import Results, with_gaps
from benchmarks.quality.setting import DENSE, Setting
from benchmarks.quality.show import plot, shown, table
from benchmarks.quality.text import load_text
from benchmarks.quality.training import Training

ROOT = Path(__file__).resolve().parents[2]
TINY = Training(
    width=16, depth=1, heads=2, context=16, steps=6, windows=2, warm_up=2, evaluation=32, points=3, sample=True
)
SPARSE = "local_steps topk:8/128,2bit every=2 keep_unsent"


def trained(setting: str, start: str, checkpoint: Path, clusters: int = 2) -> list[dict[str, Any]]:
    return TINY.run(Setting.parse(setting), start, clusters, 1, checkpoint)


def test_rows_of_dense_and_of_both_starts(tmp_path: Path) -> None:
    checkpoint = tmp_path / "dense.npz"
    scratch, continued = trained(DENSE, "scratch", checkpoint)
    assert (scratch["steps"], continued["steps"]) == (6, 4)
    assert scratch["tokens"] == 6 * 2 * 2 * 16
    assert scratch["eval_loss"] == continued["eval_loss"] < 5.6  # log 256 = 5.55 is knowing nothing
    for row in (scratch, continued):
        assert row["reduction"] == pytest.approx(1, rel=0.02)  # headers
        assert row["curve"][-1][0] == row["tokens"]
    # Under another name, the checkpoint is really read: same parameters, optimizer state, data and learning rate.
    (again,) = trained(f"{DENSE} lr={TINY.lr}", "continued", checkpoint)
    assert again["eval_loss"] == scratch["eval_loss"]
    assert again["bytes_sent"] == continued["bytes_sent"]


@pytest.mark.parametrize("clusters", [2, 4])
def test_local_steps_send_less_and_end_in_the_common_parameters(tmp_path: Path, clusters: int) -> None:
    (row,) = trained(SPARSE, "scratch", tmp_path / "unused.npz", clusters)
    assert row["rounds"] == 3
    assert row["reduction"] > 3
    (same,) = trained("local_steps fp32 every=6", "scratch", tmp_path / "unused.npz", clusters)
    assert row["eval_loss"] != same["eval_loss"]
    # A round sends the vector to all others, a ring all-reduce 2 (k - 1) / k times: equal for two clusters.
    assert same["reduction"] == pytest.approx(6 * 2 / clusters, rel=0.02)


def test_no_two_clusters_see_the_same_window_in_an_epoch() -> None:
    text = load_text(16, sample=True)
    seen = [text.batch(1, step, 4, cluster, 8) for step in range(20) for cluster in range(4)]
    assert {batch.shape for batch in seen} == {(2, 17)}
    assert len(np.unique(np.concatenate(seen), axis=0)) == 160
    together = np.concatenate([text.batch(1, 3, 2, cluster, 8) for cluster in range(2)])
    assert sorted(map(bytes, together)) == sorted(map(bytes, text.batch(1, 3, 1, 0, 8)))


@pytest.mark.parametrize(
    "text", [DENSE, SPARSE, "local_steps int8 every=2..30 outer=nesterov outer_lr=0.7 lr=0.01 warm_up=300"]
)
def test_a_setting_is_its_own_name(text: str) -> None:
    assert str(Setting.parse(text)) == text


def test_a_setting_may_have_a_rate_and_a_warm_up_of_its_own() -> None:
    training = Training(steps=10, warm_up=2, lr=4.0)
    assert [training.rate(step, Setting.parse(DENSE)) for step in range(3)] == [2.0, 4.0, 4.0]
    own = Setting.parse(f"{DENSE} lr=8.0 warm_up=4")
    assert own.dense
    assert [training.rate(step, own) for step in (0, 3, 4, 7)] == [2.0, 8.0, 8.0, 4.0]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a setting must be like .* its options among .*, got 'local_steps int8 H=2'"):
        Setting.parse("local_steps int8 H=2")


def row(setting: str, start: str, reduction: float, loss: float, seed: int = 1) -> dict[str, Any]:
    return {
        "setting": setting,
        "start": start,
        "clusters": 2,
        "seed": seed,
        "reduction": reduction,
        "eval_loss": loss,
    }


def test_gaps_best_and_table() -> None:
    rows = with_gaps(
        [
            row("local_steps int8 every=3", "scratch", 500, 2.2),
            row(DENSE, "scratch", 1, 2.0),
            row(DENSE, "continued", 1, 2.0),
            row("local_steps int8 every=3", "continued", 500, 2.0),
            row("local_steps sign every=3", "scratch", 450, 2.1),
            row("local_steps sign every=3", "continued", 450, 2.02),
            row("local_steps fp32", "scratch", 390, 2.0),  # sends too much
            row("local_steps int2 every=9", "continued", 4900, 2.05),
            row(f"{DENSE} lr=0.1", "continued", 1, 1.9),  # the best dense rate
            row("local_steps int8 every=3", "scratch", 500, 2.0, seed=2),  # no dense run of this seed yet
        ]
    )
    assert [None if r["gap_percent"] is None else round(r["gap_percent"], 6) for r in rows] == [
        *(10, 0, 5.263158, 5.263158, 5, 6.315789, 0, 7.894737, 0),
        None,
    ]
    assert shown(rows, "scratch", 2, 1) == [DENSE, "local_steps sign every=3"]
    assert shown(rows, "continued", 2, 1) == [
        *(f"{DENSE} lr=0.1", "local_steps int8 every=3", "local_steps int2 every=9")
    ]
    lines = list(table(rows))
    assert lines[2] == f"| 2 | `{DENSE}` | 1x | loss 2.0000 | +5.26 % | 1 |"
    assert lines[3] == f"| 2 | `{DENSE} lr=0.1` | 1x | - | loss 1.9000 | 1 |"
    assert "| 2 | `local_steps sign every=3` | 450x | +5.00 % | +6.32 % | 1 |" in lines


def test_rows_are_kept_once_and_another_training_is_refused(tmp_path: Path) -> None:
    results = Results(tmp_path / "quality.json", TINY)
    assert len(results.append([row("local_steps int8 every=3", "scratch", 500, 2.2)])) == 1
    assert results.append([row("local_steps int8 every=3", "scratch", 500, 9.9)]) == []
    (added,) = results.append([row(DENSE, "scratch", 1, 2.0)])
    assert added["gap_percent"] == 0
    assert [round(r["gap_percent"], 6) for r in results.rows()] == [10, 0]
    with pytest.raises(SystemExit, match=r"must hold rows of .*: name another --output"):
        Results(tmp_path / "quality.json", Training())


def test_what_has_a_row_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "quality.json", TINY)
    plan = [Run(Setting.parse(SPARSE), "continued", 2, 1)]
    work(results, TINY, tmp_path, lambda: plan)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["every_step", "every_step", "local_steps"]  # dense of both starts
    content = json.loads((tmp_path / "quality.json").read_text())
    assert {"command", "date", "versions", "training"} <= set(content)
    asked = {"setting", "start", "clusters", "seed", "tokens", "bytes_sent", "reduction", "eval_loss", "gap_percent"}
    assert all(asked <= set(row) for row in content["rows"])
    work(results, TINY, tmp_path, lambda: plan)
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "quality.json").read_text()) == content
    plot(results.rows(), tmp_path / "quality.png", 2, 1)
    assert (tmp_path / "quality.png").stat().st_size > 10_000


def test_all_of_search_txt_can_be_parsed() -> None:
    runs = searched()
    assert len(set(runs)) == len(runs) > 10
    for run in runs:
        assert run.setting.arguments(run.clusters).sync_strategy == run.setting.strategy  # none is refused


def test_the_page_states_the_committed_figures() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text()
    committed = Results(ROOT / "benchmarks" / "results" / "quality.json", Training())
    for line in table(committed.rows()):
        assert line in page
