"""NebulaArguments: everything a user can set, flat, in the style of PaddleNLP's TrainingArguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Optional, get_type_hints  # PdArgumentParser cannot read "str | None"

from paddlenlp_nebula.codec.registry import CODECS
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.link.addresses import roster_problems
from paddlenlp_nebula.privacy.arguments import PrivacyArguments, privacy_problems
from paddlenlp_nebula.strategy.arguments import strategy_problems
from paddlenlp_nebula.strategy.outer import OUTER
from paddlenlp_nebula.strategy.pace import Pace

__all__ = ["NebulaArguments"]

_CHOICES = {
    "sync_strategy": ("every_step", "local_steps"),
    "sync_parameters": ("all", "trainable", "adapters"),
    "sync_lora_merge": ("mean", "product", "freeze_a"),
    "sync_backend": ("auto", "host", "device"),
    "sync_outer": OUTER,
    "sync_weight": ("samples", "tokens", "equal"),
    "sync_on_loss": ("continue", "stop"),
    "sync_on_divergence": ("stop", "resync"),
    "sync_init": ("broadcast", "verify"),
    "sync_resume": ("refuse", "common"),
    "sync_data": (None, "shard", "own"),
    "sync_security": ("tls", "none"),
}

_TLS_FILES = ("tls_ca", "tls_cert", "tls_key")
_FROM_ENVIRONMENT = ("cluster", "clusters", "rendezvous", *_TLS_FILES, "tls_key_passphrase_file")
_LONGEST_WAIT_S = 86400  # TCP's own limits on a silent peer are not much longer


@dataclass
class NebulaArguments(PrivacyArguments):
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
            "help": "host:port of the first cluster's door, and, separated by commas, of later clusters' in their order, "
            "where one that comes back finds the run while the first is away; or 'world' for one mpiexec over all leaders, "
            "or 'loopback' for clusters in one process. Default: $NEBULA_RENDEZVOUS."
        },
    )
    sync_strategy: str = field(
        default="every_step",
        metadata={
            "help": "every_step: average gradients before each optimizer step; local_steps: average the change of the "
            "parameters every sync_every steps, which takes that many times fewer bytes."
        },
    )
    sync_every: str = field(
        default="30",
        metadata={
            "help": "Optimizer steps between two exchanges of local_steps: 30, or 5..30 to grow from 5 to 30 during "
            "training, or auto-balance[:30] to let slower clusters take fewer."
        },
    )
    sync_outer: str = field(
        default="average",
        metadata={
            "help": "What local_steps does with the averaged change: average adds it, sgd and nesterov take an outer "
            "step with sync_outer_lr and sync_outer_momentum (DiLoCo: nesterov, 0.7, 0.9)."
        },
    )
    sync_outer_lr: float = field(default=1.0, metadata={"help": "Outer learning rate of sgd and nesterov."})
    sync_outer_momentum: float = field(default=0.0, metadata={"help": "Outer momentum of sgd and nesterov."})
    sync_fragments: int = field(
        default=1,
        metadata={
            "help": "local_steps: cut the parameters into this many fragments and exchange one of them at a time, each "
            "every sync_every steps, so that the peak rate falls by as much."
        },
    )
    sync_parameters: str = field(
        default="trainable",
        metadata={"help": "Which parameters travel: all, trainable, or adapters (refused without an adapter)."},
    )
    sync_codec: str = field(
        default="fp32",
        metadata={
            "help": "The form of gradients or changes on the wire: "
            + ", ".join(c.grammar for c in CODECS.values())
            + "."
        },
    )
    sync_error_feedback: bool = field(
        default=True,
        metadata={"help": "Add what a lossy codec did not send to what it is to send next; without effect on fp32."},
    )
    sync_feedback_decay: float = field(
        default=1.0, metadata={"help": "What is kept of the error before it is fed back, 0..1 (SparseLoCo: 0.95)."}
    )
    sync_keep_unsent: bool = field(
        default=False,
        metadata={
            "help": "local_steps with error feedback: go on from the common parameters plus this cluster's own unsent "
            "change, instead of from the common ones alone."
        },
    )
    sync_final_codec: Optional[str] = field(
        default=None,
        metadata={
            "help": "local_steps with a lossy codec: send everything that is unsent in the last round, encoded by this "
            "codec. Default: int8 (bf16 and fp16 themselves) with sync_keep_unsent, without it no such round, since what "
            "is unsent is then counted several times."
        },
    )
    sync_lora_merge: str = field(
        default="mean",
        metadata={
            "help": "How LoRA's factors are merged: mean of A and of B; product: the mean of the products A B, factored "
            "anew (local_steps, also for unequal ranks); freeze_a: A is neither trained nor sent."
        },
    )
    sync_backend: str = field(
        default="auto",
        metadata={
            "help": "Where this cluster keeps and encodes what it exchanges, each cluster as it likes: host, in numpy "
            "arrays; device, in Paddle tensors beside the parameters; auto: device unless the parameters are on a CPU."
        },
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
    sync_staleness_limit: int = field(
        default=1000,
        metadata={
            "help": "Rounds of the others after which the work of a cluster that comes back is dropped instead of merged; 0 "
            "drops it always."
        },
    )
    sync_on_loss: str = field(
        default="continue", metadata={"help": "What to do when a cluster is lost: continue with the rest, or stop."}
    )
    sync_on_divergence: str = field(
        default="stop",
        metadata={
            "help": "What to do when clusters that should hold the same parameters do not: stop and name the bucket, or resync: "
            "who differs from the majority leaves, and comes back for its parameters (three clusters and more)."
        },
    )
    sync_security: Optional[str] = field(
        default=None,
        metadata={
            "help": "Protection of the links: tls, encrypted, with certificates on both sides (tls_ca, tls_cert, tls_key); "
            "or none. Default: tls; none with rendezvous=loopback or a single cluster, where there is no link."
        },
    )
    tls_ca: Optional[str] = field(
        default=None,
        metadata={"help": "PEM file of the CAs whose certificates are trusted. Default: $NEBULA_TLS_CA."},
    )
    tls_cert: Optional[str] = field(
        default=None, metadata={"help": "PEM file of this cluster's certificate. Default: $NEBULA_TLS_CERT."}
    )
    tls_key: Optional[str] = field(
        default=None, metadata={"help": "PEM file of its private key, mode 0600. Default: $NEBULA_TLS_KEY."}
    )
    tls_key_passphrase_file: Optional[str] = field(
        default=None,
        metadata={
            "help": "File with the key's passphrase, mode 0600, if it is encrypted; without one it is asked for on the "
            "terminal. Default: $NEBULA_TLS_KEY_PASSPHRASE_FILE."
        },
    )

    def __post_init__(self) -> None:
        for name in _FROM_ENVIRONMENT:
            setattr(self, name, getattr(self, name) or os.environ.get(f"NEBULA_{name.upper()}"))
        if self.sync_security is None:
            has_links = isinstance(self.clusters, str) and len(self.cluster_names) > 1 and self.rendezvous != "loopback"
            self.sync_security = "tls" if has_links else "none"
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

    @property
    def pace(self) -> Pace:
        """``sync_every``, parsed."""
        return Pace.parse(self.sync_every)

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty when all is well."""
        if found := self._kind_problems():
            return found  # what follows reads them
        found = self._roster_problems()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                found.append(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
        found += strategy_problems(self) + self._security_problems() + privacy_problems(self)
        if not isinstance(self.sync_timeout_s, (int, float)) or not 0 < self.sync_timeout_s <= _LONGEST_WAIT_S:
            found.append(
                f"sync_timeout_s must be a positive number of seconds, at most a day ({_LONGEST_WAIT_S}), "
                f"got {self.sync_timeout_s!r}"
            )
        if not isinstance(self.sync_quorum, int) or not 1 <= self.sync_quorum <= max(1, len(self.cluster_names)):
            found.append(
                f"sync_quorum must be between 1 and the number of clusters ({len(self.cluster_names)}), "
                f"got {self.sync_quorum!r}"
            )
        if self.sync_on_divergence == "resync" and (
            len(self.cluster_names) < 3 or self.rendezvous in ("world", "loopback") or self.sync_lora_merge == "product"
        ):
            found.append(
                "sync_on_divergence='resync' needs three clusters for a majority, a rendezvous where one can come back, and "
                f"another sync_lora_merge than product, got {self.clusters!r}, {self.rendezvous!r}, {self.sync_lora_merge!r}"
            )
        if not isinstance(self.sync_staleness_limit, int) or self.sync_staleness_limit < 0:
            found.append(
                f"sync_staleness_limit must be a number of rounds, 0 or more, got {self.sync_staleness_limit!r}"
            )
        return found

    def _security_problems(self) -> list[str]:
        if self.sync_security != "tls":
            return []
        if self.rendezvous == "loopback":
            return [
                "sync_security='tls' cannot act with rendezvous='loopback', whose members are threads of one process: "
                "leave it out"
            ]
        found = []
        if missing := [name for name in _TLS_FILES if not getattr(self, name)]:
            found.append(
                f"{', '.join(missing)} must be set for sync_security='tls', got nothing: make the files with `nebula keygen` "
                f"and set the field{'s' * (len(missing) > 1)} or {', '.join(f'NEBULA_{n.upper()}' for n in missing)}; only a "
                "network that nobody else can reach may do with sync_security='none'"
            )
        if bad := [name for name in self.cluster_names if not name.isascii()]:
            found.append(
                f"clusters must have ASCII names for sync_security='tls', since they are in certificates, got {', '.join(bad)}"
            )
        return found

    def _kind_problems(self) -> list[str]:
        """Text, switches and numbers that a script has set to something else: Python takes "no" for true, and true for 1."""
        kinds = {bool: (bool, "true or false"), str: (str, "text"), Optional[str]: (str | None, "text")}
        hints = get_type_hints(type(self))
        fields = {name: kinds[kind] for name, kind in hints.items() if kind in kinds}
        numbers = [name for name, kind in hints.items() if kind in (int, float, Optional[int], Optional[float])]
        return [
            f"{name} must be a number, got {getattr(self, name)!r}"
            for name in numbers
            if isinstance(getattr(self, name), bool)
        ] + [
            f"{name} must be {words}, got {getattr(self, name)!r}"
            for name, (kind, words) in fields.items()
            if not isinstance(getattr(self, name), kind) and name not in (*_CHOICES, "sync_every")
        ]

    def _roster_problems(self) -> list[str]:
        missing = [name for name in ("cluster", "clusters", "rendezvous") if not getattr(self, name)]
        if missing:
            variables = ", ".join(f"NEBULA_{name.upper()}" for name in missing)
            return [
                f"{', '.join(missing)} must be set, got nothing: start the script with `nebula launch`, or set the "
                f"field{'s' * (len(missing) > 1)} or {variables}"
            ]
        return roster_problems(str(self.cluster), self.cluster_names, str(self.rendezvous))
