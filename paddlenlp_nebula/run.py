"""A run: one process' part in training together, from meeting the others to saying goodbye.

Every local process has a Run; only the leader's holds a link. What the leader learns from other
clusters reaches its local peers through `LocalGroup.lead`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from paddlenlp.utils.log import logger

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.hello import optimizer_digest
from paddlenlp_nebula.hybrid import complete_gradients
from paddlenlp_nebula.ledger.ledger import Ledger, Round
from paddlenlp_nebula.link.door import Event
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.handshake import shake_hands
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.link.rendezvous import open_link
from paddlenlp_nebula.link.throughput import Throughput
from paddlenlp_nebula.local import LocalGroup
from paddlenlp_nebula.selection import Selection, frozen_digest, running_statistics
from paddlenlp_nebula.strategy.every_step import Average, Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.initial import spread_parameters
from paddlenlp_nebula.tensors import Tensor, write

__all__ = ["Run"]


class Run:
    """This process' part in a run of several clusters.

    Args:
        arguments: the user's settings.
        ledger: where everything is counted.

    Attributes:
        local: this cluster's processes.
        alone: no other cluster is in the run (any more); nothing is exchanged.
        ended: why another cluster has ended training for everybody, or None.
    """

    def __init__(self, arguments: NebulaArguments, ledger: Ledger) -> None:
        self.arguments = arguments
        self.ledger = ledger
        self.local = LocalGroup()
        self.alone = False
        self.ended: str | None = None
        self._link: Link | None = None
        self._party: Party | None = None
        self._strategy: EveryStep | None = None
        self._selection: Selection | None = None
        self._leaving = False
        self._throughput = Throughput()

    # Meeting

    def join(self) -> None:
        """Meet the other clusters.

        Raises:
            NebulaError: somebody is missing; HandshakeError: refused at the door.
        """
        names = self.arguments.cluster_names
        self._say(
            f"cluster {self.arguments.cluster} of {', '.join(names)}: meeting at {self.arguments.rendezvous}; "
            f"security: {self.arguments.sync_security} (nothing on the links is encrypted or authenticated)"
        )
        self.local.lead(self._join)
        self.alone = len(names) == 1

    def notes(self, note: Mapping[str, Any]) -> dict[str, Any]:
        """Exchange a small JSON object with all members; every local process gets member -> object.

        Raises:
            PeerLost: a cluster is lost although training has not begun: nobody would gain by going on.
        """

        def exchange() -> dict[str, Any]:
            party = self._leader_party()
            if self._strategy is None:
                notes = all_gather_notes(party.link, note)
            else:
                notes = party.together(lambda number: all_gather_notes(party.link, note, round=number))
            return {"notes": notes, **self._standing()}

        outcome = self.local.lead(exchange)
        self.alone, self.ended = outcome["alone"], outcome["ended"]
        return dict(outcome["notes"])

    def prepare(
        self, model: Tensor, optimizer: Any, selection: Selection, hello: Mapping[str, Any], number: int
    ) -> None:
        """Check that all clusters train the same thing, and make the selected parameters equal.

        Args:
            model: unwrapped, as the Trainer holds it.
            optimizer: as the Trainer's callbacks get it, wrapped.
            selection: what travels.
            hello: further fields that must be equal on all clusters, see `handshake.compare`.
            number: exchanges completed before (from a checkpoint).

        Raises:
            HandshakeError: on every cluster, with every difference.
        """
        self._selection = selection

        def work() -> None:
            party = self._leader_party()
            party.number = number
            self._strategy = EveryStep(Exchange(selection, codec_from_spec(self.arguments.sync_codec), party))
            party.link.measure_rtt()
            if party.link.rtt_s:
                self.ledger.rtt_ms = 1000 * max(party.link.rtt_s.values())
            fields = {"selection": selection.fingerprint(), "round": number, **hello}
            if not self.alone:
                local = running_statistics(model)
                self._say_what_stays_local(list(local.values()))
                # Equal at the beginning, and each cluster's own in a checkpoint.
                without = local if number else ()
                fields["frozen"] = frozen_digest(model, selection, self.local.tick, without)
                if number and self.arguments.sync_strategy == "every_step":
                    fields["known:optimizer_state"] = optimizer_digest(model, optimizer, self.local.tick)
            if self.arguments.sync_init == "verify":
                fields["initial"] = self._strategy.exchange.parameter_digest()
            shake_hands(party.link, fields)
            self._count_bytes()

        self.local.lead(work)
        if not self.alone and self.arguments.sync_init == "broadcast":
            self._broadcast_parameters()
        self.ledger.status = "training"
        self.ledger.members = self.arguments.cluster_names

    # Training

    def complete_gradients(self, optimizer: Any) -> None:
        """Give the leader, and its local peers, the cluster's complete gradients; see `hybrid.complete_gradients`."""
        start = time.perf_counter()
        complete_gradients(optimizer, self.local)
        self.ledger.seconds_exposed += time.perf_counter() - start

    def average_gradients(
        self,
        *,
        step: int,
        samples: int,
        tokens: int,
        loss_scale: float = 1.0,
        scaled: bool = False,
        batch_hash: int = 0,
    ) -> tuple[str, ...]:
        """Replace this process' gradients by the members' weighted average.

        Args:
            step: optimizer step, from 1.
            samples, tokens: what is behind the gradients, local processes together.
            loss_scale: what the gradients are multiplied by (fp16 scaler).
            scaled: a scaler is at work and skips steps with infinite gradients.
            batch_hash: hash of the first batch, to find clusters that were given the same data.

        Returns:
            The clusters whose gradients were not finite; if any, every scaler will skip the step.
        """
        weight = {"samples": float(samples), "tokens": float(tokens), "equal": 1.0}[self.arguments.sync_weight]
        start = time.perf_counter()
        average: Average | None = None

        def work() -> dict[str, Any]:
            nonlocal average
            average = self._leader_strategy().average(Contribution(step, weight, loss_scale, scaled, batch_hash))
            self._note_outcome(average, step)
            return {
                "present": average.present,
                "non_finite": average.non_finite,
                "share": average.share,
                "members": len(average.batch_hashes),
                **self._standing(),
            }

        if self._link is not None:
            self._count_bytes()  # what was said since the last round is not this one's
        waited = self._link.seconds_waiting if self._link else 0.0
        outcome = self.local.lead(work)
        self.alone, self.ended = outcome["alone"], outcome["ended"]
        non_finite = tuple(outcome["non_finite"])
        assert self._selection is not None
        if outcome["members"] > 1:  # otherwise the average is what we have
            values = average.values if average else np.empty(self._selection.numel, dtype=np.float32)
            self.local.broadcast(values)
            apply_average(self._selection, values, outcome["present"], skip=bool(non_finite), loss_scale=loss_scale)
        if self._link is not None and outcome["members"]:
            self._record(step, outcome["share"], time.perf_counter() - start, self._link.seconds_waiting - waited)
        return non_finite

    def after_step(self) -> None:
        """After the optimizer step: hash the parameters, which the next round compares."""
        if self._strategy is not None and not self.alone:
            start = time.perf_counter()
            self._strategy.exchange.refresh_digests()
            self.ledger.seconds_exposed += time.perf_counter() - start

    def agree_on_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean over the members of each metric (a plain mean, in the configured order)."""
        start = time.perf_counter()
        notes = self.notes({"metrics": dict(metrics)})
        self.ledger.seconds_exposed += time.perf_counter() - start  # above all waiting for the slowest evaluation
        if self._link is not None:
            self._count_bytes()
        agreed = {}
        for key in dict.fromkeys(key for note in notes.values() for key in note["metrics"]):
            values = [note["metrics"].get(key) for note in notes.values()]
            if any(not isinstance(value, int | float) for value in values):
                raise NebulaError(
                    f"all clusters must compute the metric {key!r} to agree on it, got "
                    f"{ {name: note['metrics'].get(key) for name, note in notes.items()} }: use the same compute_metrics"
                )
            agreed[key] = sum(values) / len(values)
        return agreed

    # Leaving

    def finish(self) -> None:
        """Training is complete: compare the parameters once more and part."""

        def work() -> None:
            strategy = self._leader_strategy()
            strategy.exchange.refresh_digests()
            if not self.alone and self.ended is None:
                strategy.compare_final()
                self._standing()
            self.ledger.parameter_digest = strategy.exchange.parameter_digest()
            self.leave("its training is complete", deliberate=True)

        self.local.lead(work)
        self.ledger.status = "done"

    def leave(self, reason: str, *, deliberate: bool) -> None:
        """Tell the others the reason and close the link, whatever happens. Does nothing the second time."""
        if self._leaving:
            return
        self._leaving = True
        if not deliberate:
            self.ledger.status = "failed"
            self.ledger.facts["failure"] = reason
        if self._link is None:
            return
        try:
            self._link.leave(reason, deliberate=deliberate)
        except Exception as error:
            if deliberate:
                raise
            logger.warning(f"nebula: saying goodbye failed with {error!r}")  # the first error matters more
        finally:
            self._link.close()
            self._count_bytes()

    def degrade(self, sentence: str, *, once: bool = False) -> None:
        """Note in the ledger and in the log that something went less well than asked for; ``once``: unless noted."""
        if once and sentence in self.ledger.degradations:
            return
        self.ledger.degrade(sentence)
        logger.warning(f"nebula: {sentence}")

    @property
    def number(self) -> int:
        """Completed exchanges (on the leader)."""
        return self._party.number if self._party is not None else 0

    # Inside

    def _join(self) -> None:
        arguments = self.arguments
        self._link = open_link(
            arguments.cluster_name,
            arguments.cluster_names,
            str(arguments.rendezvous),
            timeout_s=arguments.sync_timeout_s,
            on_event=self._on_event,
            on_wait=self.local.tick,
            say=self._say,
        )
        self._party = Party(
            self._link, on_loss=arguments.sync_on_loss, quorum=arguments.sync_quorum, report=self.degrade
        )
        if self._link.peers:
            self._say(f"all {len(arguments.cluster_names)} clusters have met")

    def _leader_party(self) -> Party:
        assert self._party is not None, "join() comes first"
        return self._party

    def _standing(self) -> dict[str, Any]:
        """Who is left after an exchange, for the local peers and for the report."""
        party = self._leader_party()
        if self._strategy is not None:
            self.ledger.members = party.link.members
        return {"alone": not party.link.peers, "ended": party.ended}

    def _leader_strategy(self) -> EveryStep:
        assert self._strategy is not None, "prepare() comes first"
        return self._strategy

    def _say_what_stays_local(self, statistics: list[str]) -> None:
        if statistics:
            sentence = (
                f"BatchNorm's running statistics ({statistics[0]} and {len(statistics) - 1} more) follow each cluster's own "
                "data and are not exchanged, so evaluations differ a little: LayerNorm and GroupNorm have none"
            )
            self.degrade(sentence, once=True)

    def _broadcast_parameters(self) -> None:
        """Give everybody the first cluster's selected parameters."""
        assert self._selection is not None
        values: Float32Vector = np.empty(self._selection.numel, dtype=np.float32)

        def work() -> None:
            strategy = self._leader_strategy()
            spread_parameters(strategy.exchange, self.arguments.cluster_names[0], values)

        self.local.lead(work)
        self.local.broadcast(values)
        for index, parameter in enumerate(self._selection.parameters):
            write(parameter, values[self._selection.offsets[index] : self._selection.offsets[index + 1]])
        if self._strategy is not None:
            self._strategy.exchange.refresh_digests()

    def _note_outcome(self, average: Average, step: int) -> None:
        if average.ended_by:
            names = ", ".join(map(repr, average.ended_by))
            self._leader_party().end(f"cluster {names} ended training before step {step}: everybody ends there")
        seen: dict[int, str] = {}
        for member, batch_hash in average.batch_hashes.items():
            if batch_hash and batch_hash in seen:
                self.degrade(
                    f"clusters {seen[batch_hash]!r} and {member!r} saw the same first batch: they add nothing to each "
                    "other; use NebulaTrainer with sync_data=shard, or give each its own data"
                )
            seen[batch_hash] = member
        if average.non_finite:
            self.degrade(
                f"round {self.number}: the gradients of {', '.join(average.non_finite)} were not finite, so every "
                "cluster skips this optimizer step and its loss scale shrinks"
            )

    def _record(self, step: int, share: float, seconds: float, waiting: float) -> None:
        assert self._link is not None
        sent, received = self.ledger.bytes_sent, self.ledger.bytes_received
        self._count_bytes()
        self.ledger.record(
            Round(
                round=self.number,
                step=step,
                members=len(self._link.members),
                weight=share,
                bytes_sent=self.ledger.bytes_sent - sent,
                bytes_received=self.ledger.bytes_received - received,
                seconds_exposed=seconds,
                seconds_waiting=waiting,
                digest=self._leader_strategy().exchange.parameter_digest(),
            )
        )

    def _count_bytes(self) -> None:
        assert self._link is not None
        self.ledger.count_bytes(dict(self._link.bytes_sent), dict(self._link.bytes_received))
        self._link.bytes_sent.clear()
        self._link.bytes_received.clear()
        self._throughput.look(self._link.channels)
        if (rate := self._throughput.mbit_s) is not None:
            self.ledger.link_mbit_s = max(rate, self.ledger.link_mbit_s or 0.0)

    def _on_event(self, event: Event) -> None:
        if self._leaving or event.kind is Kind.PORT or event.body.get("deliberate"):
            return
        what = "was refused" if event.kind is Kind.REFUSED else "is gone"
        logger.warning(f"nebula: cluster {event.cluster} {what}: {event.body.get('reason')}")

    def _say(self, sentence: str) -> None:
        if self.local.is_leader:
            logger.info(f"nebula: {sentence}")
