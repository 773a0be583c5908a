"""NebulaArguments: everything a user can set, flat, in the style of PaddleNLP's TrainingArguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Optional  # PdArgumentParser cannot read "str | None"

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["NebulaArguments"]

_CHOICES = {
    "sync_strategy": ("every_step",),
    "sync_parameters": ("all", "trainable", "adapters"),
    "sync_codec": ("fp32", "bf16", "fp16"),
    "sync_weight": ("samples", "tokens", "equal"),
    "sync_on_loss": ("continue", "stop"),
    "sync_init": ("broadcast", "verify"),
    "sync_resume": ("refuse", "common"),
    "sync_data": (None, "shard", "own"),
    "sync_security": ("none",),
}


@dataclass
class NebulaArguments:
    """How this cluster trains together with others.

    Fields that are None are filled in from the environment, which ``nebula launch`` sets.

    Raises:
        ConfigurationError: with every problem at once, if any field is missing or out of range.
    """

    cluster: Optional[str] = field(default=None, metadata={"help": "This cluster's name. Default: $NEBULA_CLUSTER."})
    clusters: Optional[str] = field(
        default=None,
        metadata={
            "help": "All clusters' names, comma-separated, the same on every cluster; their order is the order of "
            "reduction and the first one keeps the door. Default: $NEBULA_CLUSTERS."
        },
    )
    rendezvous: Optional[str] = field(
        default=None,
        metadata={
            "help": "host:port of the first cluster's door, or 'world' for one mpiexec over all leaders, or "
            "'loopback' for clusters in one process. Default: $NEBULA_RENDEZVOUS."
        },
    )
    sync_strategy: str = field(
        default="every_step",
        metadata={"help": "every_step: average gradients before each optimizer step."},
    )
    sync_parameters: str = field(
        default="trainable",
        metadata={"help": "Which parameters travel: all, trainable, or adapters (refused without an adapter)."},
    )
    sync_codec: str = field(
        default="fp32", metadata={"help": "What gradients are cast to on the wire: fp32, bf16, fp16."}
    )
    sync_weight: str = field(
        default="samples",
        metadata={"help": "What a cluster's weight in the average is proportional to: samples, tokens, or equal."},
    )
    sync_init: str = field(
        default="broadcast",
        metadata={
            "help": "How the selected parameters are made equal at the start: broadcast from the first cluster, or "
            "verify that they are equal already and refuse otherwise."
        },
    )
    sync_resume: str = field(
        default="refuse",
        metadata={
            "help": "What to do with clusters whose checkpoints are at different steps: refuse, or (NebulaTrainer) "
            "resume all of them from the highest common one."
        },
    )
    sync_data: Optional[str] = field(
        default=None,
        metadata={
            "help": "shard: NebulaTrainer gives each cluster its own part of the same dataset; own: each cluster has "
            "brought its own data. Default: shard with NebulaTrainer, own with the callback alone."
        },
    )
    sync_timeout_s: float = field(
        default=600.0, metadata={"help": "Longest wait, in seconds, for a peer that sends nothing."}
    )
    sync_quorum: int = field(default=1, metadata={"help": "Clusters (this one included) needed to go on."})
    sync_on_loss: str = field(
        default="continue", metadata={"help": "What to do when a cluster is lost: continue with the rest, or stop."}
    )
    sync_security: str = field(default="none", metadata={"help": "Protection of the links: none."})

    def __post_init__(self) -> None:
        self.cluster = self.cluster or os.environ.get("NEBULA_CLUSTER")
        self.clusters = self.clusters or os.environ.get("NEBULA_CLUSTERS")
        self.rendezvous = self.rendezvous or os.environ.get("NEBULA_RENDEZVOUS")
        if problems := self.problems():
            raise ConfigurationError(problems)

    @property
    def cluster_names(self) -> tuple[str, ...]:
        """All clusters, in the order of reduction."""
        return tuple(name.strip() for name in (self.clusters or "").split(","))

    @property
    def cluster_name(self) -> str:
        """This cluster's name (``cluster``, known to be set)."""
        assert self.cluster is not None
        return self.cluster

    @property
    def cluster_index(self) -> int:
        """This cluster's position in ``cluster_names``."""
        return self.cluster_names.index(self.cluster_name)

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty when all is well."""
        found = self._roster_problems()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                found.append(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
        if not isinstance(self.sync_timeout_s, (int, float)) or not 0 < self.sync_timeout_s < float("inf"):
            found.append(f"sync_timeout_s must be a positive number of seconds, got {self.sync_timeout_s!r}")
        if not isinstance(self.sync_quorum, int) or not 1 <= self.sync_quorum <= max(1, len(self.cluster_names)):
            found.append(
                f"sync_quorum must be between 1 and the number of clusters ({len(self.cluster_names)}), "
                f"got {self.sync_quorum!r}"
            )
        return found

    def _roster_problems(self) -> list[str]:
        missing = [name for name in ("cluster", "clusters", "rendezvous") if not getattr(self, name)]
        if missing:
            variables = ", ".join(f"NEBULA_{name.upper()}" for name in missing)
            return [
                f"{', '.join(missing)} must be set, got nothing: start the script with `nebula launch`, or set the "
                f"field{'s' * (len(missing) > 1)} or {variables}"
            ]
        found = []
        names = self.cluster_names
        bad = [
            name for name in names if not name.replace("-", "").replace("_", "").isalnum() or len(name.encode()) > 63
        ]
        if bad:
            found.append(
                f"clusters must be names of 1 to 63 letters, digits, '-' and '_', separated by commas, got {self.clusters!r}"
            )
        elif len(set(names)) != len(names):
            found.append(f"clusters must name each cluster once, got {self.clusters!r}")
        elif self.cluster not in names:
            found.append(f"cluster must be one of clusters ({', '.join(names)}), got {self.cluster!r}")
        if len(names) > 64:
            found.append(f"clusters must name at most 64 clusters, got {len(names)}")
        if self.rendezvous not in ("world", "loopback"):
            host, colon, port = (self.rendezvous or "").rpartition(":")
            if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                found.append(
                    "rendezvous must be 'host:port' with a port from 1 to 65535, 'world' or 'loopback', "
                    f"got {self.rendezvous!r}"
                )
        return found
