"""The recipes that exchange little, each a few steps long, by two clusters of `nebula run` over real MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Small enough for a test; everything else, and all of the exchange, is as shipped.
SMALL = {
    "finetune_lora_sparse": ["--model", "scratch", "--eval_sentences", "32", "--max_length", "16"],
    "pretrain_local_steps": [
        *("--text", "sample", "--num_hidden_layers", "1", "--hidden_size", "32", "--max_seq_length", "32"),
        *("--eval_blocks", "32"),
    ],
}


@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "every", "share", "last_share"),
    [
        # The last round of a run that keeps its unsent change carries all of it, at a byte per parameter.
        pytest.param("finetune_lora_sparse", 5, 0.14, 1.05, marks=pytest.mark.slow),
        ("pretrain_local_steps", 5, 0.055, 0.055),
    ],
)
def test_two_clusters_end_with_one_model(
    name: str, every: int, share: float, last_share: float, tmp_path: Path
) -> None:
    steps = 2 * every + 1
    words = ["--local-clusters", "2", "--max_steps", str(steps), "--no_compare_alone"]
    words += ["--per_device_train_batch_size", "4", "--output_dir", str(tmp_path), *SMALL[name]]
    command = [sys.executable, "-m", "paddlenlp_nebula.cli", "run", name, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    west, east = (_read(tmp_path / cluster / "nebula_report.json") for cluster in ("west", "east"))
    assert west["parameter_digest"] == east["parameter_digest"]
    assert [entry["step"] for entry in west["per_round"]] == [every, 2 * every, steps]
    assert not west["degradations"]
    for report in (west, east):
        sparse, last = report["per_round"][0]["bytes_sent"], report["per_round"][-1]["bytes_sent"]
        selected = report["parameters_selected"]
        # One message of 44 bytes and more frames every bucket, which tells in models as small as these.
        assert sparse < share * selected + 2000
        assert last < last_share * selected + 2000
        assert (last > selected) == (last_share > 1)
    result = _read(tmp_path / "west" / "recipe_result.json")
    assert result == {**_read(tmp_path / "east" / "recipe_result.json"), "saved": result["saved"]}
    assert Path(result["saved"]).is_dir()


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
