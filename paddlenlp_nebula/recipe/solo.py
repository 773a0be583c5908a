"""What a training without other clusters, run for comparison, says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlenlp.trainer import TrainerCallback

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.ledger.ledger import REPORT_NAME
from paddlenlp_nebula.ledger.strict_json import json_text

__all__ = ["SoloReport"]


class SoloReport(TrainerCallback):
    """Writes the part of a ``nebula_report.json`` that is not about exchange: ``nebula run`` shows how far it is.

    Args:
        cluster: whose part of the data it trains on.
    """

    def __init__(self, cluster: str) -> None:
        self._report: dict[str, Any] = {"cluster": cluster, "clusters": [cluster], "losses": []}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The number of steps is known."""
        self._report |= {"status": "training", "max_steps": state.max_steps}
        self._write(args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """There is a new loss or, at the end, the mean over the run."""
        logs = logs or {}
        if "loss" in logs:
            self._report["train_loss"] = float(logs["loss"])
            self._report["losses"].append([state.global_step, float(logs["loss"])])
            self._write(args, state)
        elif "train_loss" in logs:
            self._report["train_loss"] = float(logs["train_loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All steps are done."""
        self._report["status"] = "done"
        self._write(args, state)

    def _write(self, args: Any, state: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._report["steps"] = state.global_step
        path = Path(args.output_dir) / REPORT_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json_text(self._report), encoding="utf-8")
