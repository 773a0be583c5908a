"""The ledger: per round and in all, bytes by kind, seconds computing and exposed, degradations."""

from __future__ import annotations

import time
from collections import deque
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.ledger.strict_json import json_text
from paddlenlp_nebula.privacy.accountant import Accountant

__all__ = ["REPORT_NAME", "SCHEMA", "Ledger", "Round"]

REPORT_NAME = "nebula_report.json"
SCHEMA = 1
# Both are rewritten with every report, so they must not grow without end.
_KEPT_ROUNDS = 1000
_KEPT_LOSSES = 500
_KEPT_EVENTS = 500


@dataclass(slots=True)
class Round:
    """One exchange of gradients.

    Attributes:
        round, step: exchange number and optimizer step it belongs to, both from 1.
        members: how many clusters took part.
        weight: this cluster's share of the average, 0..1.
        bytes_sent, bytes_received: headers and payloads, all peers together.
        seconds_exposed: training time lost to the exchange.
        seconds_waiting: the part of it with nothing to do but wait.
        digest: hash of the selected parameters before the round.
        update_norm: of this cluster's update before privacy_clip_norm bounded it; None without that.
    """

    round: int
    step: int
    members: int
    weight: float
    bytes_sent: int
    bytes_received: int
    seconds_exposed: float
    seconds_waiting: float
    digest: str
    update_norm: float | None = None


@dataclass(slots=True)
class Ledger:
    """Counters of one cluster. Those listed in `state` go on counting after a resume.

    Attributes:
        facts: what does not change during the run (cluster, codec, ...), copied into the report.
        steps, samples, tokens: done so far, local processes together; no tokens where batches have none.
        bytes_sent, bytes_received: all kinds of messages.
        bytes_by_kind: kind -> [sent, received].
        seconds_compute: training steps less what the exchange took of them.
        seconds_exposed: training time lost to exchange.
        link_mbit_s: the best rate measured on the way out to the slowest peer; None where it is not (``world``).
        losses: the training loss over the run, each [optimizer step, loss].
        degradations: a sentence for each thing that went less well than asked for.
        events: the last losses and returns of clusters: time (seconds since 1970), what, cluster, exchange, reason.
        refused_connections: how many connections the door has turned away, by category.
        privacy: counts what rounds with noise tell, if there is noise.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    status: str = "waiting"
    members: tuple[str, ...] = ()
    rounds: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_by_kind: dict[str, list[int]] = field(default_factory=dict)
    seconds_compute: float = 0.0
    seconds_exposed: float = 0.0
    link_mbit_s: float | None = None
    rtt_ms: float | None = None
    train_loss: float | None = None
    losses: list[list[float]] = field(default_factory=list)
    eval_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parameter_digest: str | None = None
    degradations: list[str] = field(default_factory=list)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    refused_connections: dict[str, int] = field(default_factory=dict)
    per_round: deque[Round] = field(default_factory=lambda: deque(maxlen=_KEPT_ROUNDS))
    privacy: Accountant | None = None

    _COUNTERS = (
        "rounds",
        "steps",
        "samples",
        "tokens",
        "bytes_sent",
        "bytes_received",
        "bytes_by_kind",
        "seconds_compute",
        "seconds_exposed",
        "link_mbit_s",
        "losses",
        "degradations",
    )

    @property
    def utilisation(self) -> float | None:
        """Compute over compute and exposed, from measured times; None before the first step."""
        total = self.seconds_compute + self.seconds_exposed
        return self.seconds_compute / total if total else None

    def count_bytes(self, sent: dict[str, int], received: dict[str, int]) -> None:
        """Add message bytes by kind."""
        for side, counts in enumerate((sent, received)):
            for kind, count in counts.items():
                self.bytes_by_kind.setdefault(kind, [0, 0])[side] += count
        self.bytes_sent += sum(sent.values())
        self.bytes_received += sum(received.values())

    def record(self, entry: Round) -> None:
        """Add a round."""
        self.rounds += 1
        self.seconds_exposed += entry.seconds_exposed
        self.per_round.append(entry)

    def note_loss(self, step: int, loss: float) -> None:
        """Add a point to the loss curve; when it is full, every second one goes, so that it still spans the run."""
        self.train_loss = loss
        self.losses.append([step, loss])
        if len(self.losses) > _KEPT_LOSSES:
            del self.losses[1::2]

    def degrade(self, sentence: str) -> None:
        """Note that something went less well than asked for."""
        self.degradations.append(sentence)

    def event(self, what: str, cluster: str, exchange: int, reason: str) -> None:
        """Note that a cluster was ``lost``, has ``ended`` or has ``returned``."""
        self.events.append(
            {"time": time.time(), "what": what, "cluster": cluster, "exchange": exchange, "reason": reason[:500]}
        )

    def state(self) -> dict[str, Any]:
        """The counters that a checkpoint keeps (JSON)."""
        counters = {name: deepcopy(getattr(self, name)) for name in self._COUNTERS}
        return counters if self.privacy is None else {**counters, "privacy": self.privacy.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's counters; what has been noted since, on the way into the run, comes after them."""
        noted = self.degradations
        for name in self._COUNTERS:
            if name in state:
                setattr(self, name, deepcopy(state[name]))
        if self.degradations is not noted:
            self.degradations += [sentence for sentence in noted if sentence not in self.degradations]
        if self.privacy is not None and "privacy" in state:
            self.privacy.restore(state["privacy"])
        elif self.privacy is not None and self.rounds:
            self.degrade(
                f"privacy_epsilon does not count the {self.rounds} rounds of the checkpoint, which had no noise"
            )

    def report(self) -> dict[str, Any]:
        """The content of nebula_report.json."""
        clusters = max(1, len(self.facts.get("clusters", ())))
        # A ring all-reduce sends 2 (k-1) / k times the data: the least that synchronous data parallel needs.
        per_step = 2 * (clusters - 1) / clusters * 4
        dense = round(per_step * self.facts.get("parameters_selected", 0) * self.steps)
        full = round(per_step * self.facts.get("parameters_total", 0) * self.steps)
        return {
            "schema": SCHEMA,
            **self.facts,
            "status": self.status,
            "members": list(self.members),
            "rounds": self.rounds,
            "steps": self.steps,
            "samples": self.samples,
            "tokens": self.tokens,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_by_kind": self.bytes_by_kind,
            "bytes_dense_fp32_every_step": dense,
            "bytes_full_model_fp32_every_step": full,
            "reduction": dense / self.bytes_sent if self.bytes_sent else None,
            "seconds_compute": self.seconds_compute,
            "seconds_exposed": self.seconds_exposed,
            "utilisation": self.utilisation,
            "link_mbit_s": self.link_mbit_s,
            "rtt_ms": self.rtt_ms,
            "parameter_digest": self.parameter_digest,
            "train_loss": self.train_loss,
            "losses": self.losses,
            "eval_loss": self.eval_loss,
            "metrics": self.metrics,
            "degradations": self.degradations,
            "events": list(self.events),
            "refused_connections": self.refused_connections,
            **({} if self.privacy is None else self.privacy.report()),
            "per_round": [asdict(entry) for entry in self.per_round],
        }

    def write(self, path: Path) -> None:
        """Write the report as strict JSON (`json_text`), atomically, so that it can be read while training goes on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json_text(self.report()))
