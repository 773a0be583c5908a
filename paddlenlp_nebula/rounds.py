"""The strategies inside a Trainer: every process of the cluster takes part, its leader speaks to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.checkpoint import STATE_NAME, Arrays, load_state
from paddlenlp_nebula.codec.codec import Codec, Float32Vector
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.hello import optimizer_digest
from paddlenlp_nebula.hybrid import complete_gradients
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection, frozen_digest, running_statistics
from paddlenlp_nebula.strategy.every_step import Average, Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange, buckets_for
from paddlenlp_nebula.strategy.initial import spread_parameters
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, Merge, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.tensors import Tensor, master_weight, write

__all__ = ["EveryStepRounds", "LocalStepsRounds", "Rounds", "Step", "rounds_for"]


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step of this cluster.

    Attributes:
        number: from 1.
        samples, tokens: what is behind its gradients, local processes together.
        batch_hash: hash of the first batch ever, in the first step only, else 0.
        loss_scale: what the gradients are multiplied by (fp16 scaler).
        scaled: a scaler is at work and skips steps with infinite gradients.
        seconds: that it took, without any exchange; 0 before it is done.
    """

    number: int
    samples: int
    tokens: int
    batch_hash: int = 0
    loss_scale: float = 1.0
    scaled: bool = False
    seconds: float = 0.0


class Rounds(ABC):
    """When this cluster exchanges what, on each of its processes.

    Args:
        run: the clusters.
        selection: the parameters that travel.
        optimizer: as the Trainer's callbacks get it, wrapped.
        max_steps: optimizer steps of the whole training.
    """

    def __init__(self, run: Run, selection: Selection, optimizer: Any, max_steps: int) -> None:
        self._run = run
        self._selection = selection
        self._optimizer = optimizer
        self._max_steps = max_steps
        self._arguments: NebulaArguments = run.arguments
        self._leader: Any = None  # the strategy, on the leader

    @property
    def exchange(self) -> Exchange:
        """The leader's."""
        exchange: Exchange = self._leader.exchange
        return exchange

    @abstractmethod
    def lead(self) -> None:
        """On the leader, once the clusters have met: cut the selection and hash the parameters."""

    def before_step(self, step: Step) -> None:
        """Gradients are complete on this process, and the optimizer has not used them yet."""
        return

    @abstractmethod
    def after_step(self, step: Step) -> None:
        """Parameters are new."""

    def before_end(self, step: int) -> None:
        """The Trainer takes no step after this one, but has not loaded its best model yet."""
        return

    def finish(self, step: int) -> None:
        """The training of ``step`` optimizer steps is complete: compare the parameters once more, and part."""

        def compare() -> str:
            self.compare_final(step)
            return self.exchange.parameter_digest()

        self._run.finish(compare)

    @abstractmethod
    def compare_final(self, step: int) -> None:
        """On the leader: compare the parameters a last time."""

    @abstractmethod
    def state(self) -> Arrays:
        """On the leader: what a checkpoint must keep besides the Trainer's; empty if nothing."""

    @abstractmethod
    def restore(self, arrays: Arrays) -> dict[str, Any]:
        """On the leader: continue from `state`; returns what `restored` needs on every process (JSON)."""

    def restored(self, outcome: Mapping[str, Any]) -> None:
        """On every process: the rest of `restore`."""
        return

    def prepare(self, model: Tensor, hello: Mapping[str, Any], number: int, state: Path | None) -> None:
        """Check that all clusters train the same thing, and make the selected parameters equal.

        Args:
            model: unwrapped, as the Trainer holds it.
            hello: what else must be equal on all clusters, see `handshake.compare`.
            number: exchanges completed before (from a checkpoint), else 0.
            state: this cluster's file in that checkpoint, if there is one.

        Raises:
            HandshakeError: on every cluster, with every difference.
        """
        run = self._run
        outcome: dict[str, Any] = {}

        def describe() -> dict[str, Any]:
            self.lead()
            keeps = bool(number and self.state())
            if keeps and state is not None:
                outcome.update(self.restore(load_state(state)))
            fields = {"selection": self._selection.fingerprint(), **hello}
            fields["nebula_state"] = ("there" if state else "missing") if keeps else None
            if not run.alone:
                local = running_statistics(model)
                self._say_what_stays_local(list(local.values()))
                # Equal at the beginning, and each cluster's own in a checkpoint.
                fields["frozen"] = frozen_digest(model, self._selection, run.local.tick, local if number else ())
                if number and self._arguments.sync_strategy == "every_step":
                    fields["known:optimizer_state"] = optimizer_digest(model, self._optimizer, run.local.tick)
            if self._arguments.sync_init == "verify" or fields["nebula_state"] == "there":
                fields["initial"] = self.exchange.parameter_digest()
            return fields

        run.prepare(describe, number)
        kept = self._run.local.lead(lambda: {"keeps": bool(number and self.state()), "restored": outcome})
        if kept["restored"]:
            self.restored(kept["restored"])
        if kept["keeps"] and state is None:
            run.degrade(
                f"the checkpoint of step {hello['global_step']} holds no {STATE_NAME}: what was not sent before is lost, "
                "and all clusters start again from the first one's parameters"
            )
        if not run.alone and self._arguments.sync_init == "broadcast" and not kept["restored"]:
            self._broadcast_parameters()

    def _broadcast_parameters(self) -> None:
        """Give all clusters the first one's selected parameters."""
        values: Float32Vector = np.empty(self._selection.numel, dtype=np.float32)
        self._run.local.lead(lambda: spread_parameters(self.exchange, self._arguments.cluster_names[0], values))
        self._run.local.broadcast(values)
        offsets = self._selection.offsets
        for index in range(len(self._selection)):
            self._put(index, values[offsets[index] : offsets[index + 1]])
        if self._run.local.is_leader:
            self._rebase()

    def _rebase(self) -> None:
        """On the leader: parameters were overwritten from outside."""
        self.exchange.refresh_digests()

    def _say_what_stays_local(self, statistics: list[str]) -> None:
        if statistics:
            sentence = (
                f"BatchNorm's running statistics ({statistics[0]} and {len(statistics) - 1} more) follow each cluster's own "
                "data and are not exchanged, so evaluations differ a little: LayerNorm and GroupNorm have none"
            )
            self._run.degrade(sentence, once=True)

    def _put(self, index: int, values: Float32Vector) -> None:
        parameter = self._selection.parameters[index]
        if (master := master_weight(self._optimizer, parameter)) is not None:
            write(master, values)
        write(parameter, values)

    def _weight(self, samples: float, tokens: float) -> float:
        return {"samples": float(samples), "tokens": float(tokens), "equal": 1.0}[self._arguments.sync_weight]

    def _note(self, outcome: Average | Merge, step: int) -> None:
        """On the leader: who ends the training, and who has brought the same data."""
        if outcome.ended_by:
            names = ", ".join(map(repr, outcome.ended_by))
            self._run.party.end(f"cluster {names} ended training before step {step}: everybody ends there")
        seen: dict[int, str] = {}
        for member, batch_hash in outcome.batch_hashes.items():
            if batch_hash and batch_hash in seen:
                self._run.degrade(
                    f"clusters {seen[batch_hash]!r} and {member!r} saw the same first batch: they add nothing to each "
                    "other; use NebulaTrainer with sync_data=shard, or give each its own data"
                )
            seen[batch_hash] = member


class EveryStepRounds(Rounds):
    """`EveryStep`: the members' gradients are averaged before each optimizer step."""

    def lead(self) -> None:
        self._leader = EveryStep(Exchange(self._selection, codec_for(self._arguments), self._run.party))

    def before_step(self, step: Step) -> None:
        run = self._run
        if run.alone:
            return
        with run.exposed():
            complete_gradients(self._optimizer, run.local)
        with run.round(step.number) as entry:
            average: Average | None = None

            def work() -> dict[str, Any]:
                nonlocal average
                weight = self._weight(step.samples, step.tokens)
                average = self._leader.average(
                    Contribution(step.number, weight, step.loss_scale, step.scaled, step.batch_hash)
                )
                self._note(average, step.number)
                if average.non_finite:
                    run.degrade(
                        f"round {run.number}: the gradients of {', '.join(average.non_finite)} were not finite, so every "
                        "cluster skips this optimizer step and its loss scale shrinks"
                    )
                return {
                    "present": average.present,
                    "skip": bool(average.non_finite),
                    "members": len(average.batch_hashes),
                    "share": average.share,
                    "digest": self.exchange.parameter_digest(),
                }

            outcome = run.lead(work)
            if outcome["members"] > 1:  # otherwise the average is what we have
                values = average.values if average else np.empty(self._selection.numel, dtype=np.float32)
                run.local.broadcast(values)
                skip = outcome["skip"]
                apply_average(self._selection, values, outcome["present"], skip=skip, loss_scale=step.loss_scale)
            entry.update(outcome)

    def after_step(self, step: Step) -> None:
        if self._run.local.is_leader and not self._run.alone:
            with self._run.exposed():
                self.exchange.refresh_digests()

    def compare_final(self, step: int) -> None:
        self.exchange.refresh_digests()
        if not self._run.alone and self._run.ended is None:
            self._leader.compare_final()

    def state(self) -> Arrays:
        return self.exchange.state()

    def restore(self, arrays: Arrays) -> dict[str, Any]:
        self.exchange.restore(arrays)
        return {}


class LocalStepsRounds(Rounds):
    """`LocalSteps`: the members' changes are averaged every so many optimizer steps."""

    def __init__(self, run: Run, selection: Selection, optimizer: Any, max_steps: int) -> None:
        super().__init__(run, selection, optimizer, max_steps)
        self._pace = self._arguments.pace
        self._fragments = self._arguments.sync_fragments
        self._buckets = buckets_for(selection, codec_for(self._arguments), self._fragments)
        self._every = self._pace.steps(0, max_steps) // self._fragments
        self._steps = self._batch_hash = 0
        self._samples = self._tokens = self._seconds = 0.0

    def lead(self) -> None:
        arguments = self._arguments
        codec = codec_for(arguments)
        exchange = Exchange(self._selection, codec, self._run.party, self._fragments)
        outer = OuterOptimizer(arguments.sync_outer, arguments.sync_outer_lr, arguments.sync_outer_momentum)
        self._leader = LocalSteps(
            exchange,
            outer,
            self._fragments,
            self._source,
            same_step=not self._pace.balance,
            final_codec=None if codec.lossless else codec_from_spec(arguments.sync_final_codec),
            keep_unsent=arguments.sync_keep_unsent,
        )

    def after_step(self, step: Step) -> None:
        self._steps += 1
        self._samples += step.samples
        self._tokens += step.tokens
        self._seconds += step.seconds
        self._batch_hash = self._batch_hash or step.batch_hash
        last = step.number >= self._max_steps
        if last or self._steps >= self._every:
            self._merge(step.number, final=last)

    def before_end(self, step: int) -> None:
        if self._steps and self._run.ended is None:
            self._merge(step, final=True)

    def compare_final(self, step: int) -> None:
        if not self._run.alone:
            self._leader.compare_final(step)

    def state(self) -> Arrays:
        counters = np.array([self._steps, self._every, self._samples, self._tokens, self._seconds], dtype=np.float64)
        return {"counters": counters, **self._leader.state()}

    def restore(self, arrays: Arrays) -> dict[str, Any]:
        arrays = dict(arrays)
        counters = arrays.pop("counters", np.zeros(5))
        self._leader.restore(arrays)
        return {"counters": [float(counter) for counter in counters]}

    def restored(self, outcome: Mapping[str, Any]) -> None:
        steps, every, self._samples, self._tokens, self._seconds = outcome["counters"]
        self._steps, self._every = int(steps), int(every)

    def _rebase(self) -> None:
        self._leader.rebase()

    def _source(self, index: int) -> Tensor:
        """Where the float32 values of a parameter are."""
        parameter = self._selection.parameters[index]
        master = master_weight(self._optimizer, parameter)
        return parameter if master is None else master

    def _merge(self, number: int, *, final: bool) -> None:
        """A round after optimizer step ``number``."""
        run = self._run
        if run.alone:
            self._forget()
            return
        step_s = self._seconds / max(1, self._steps)
        with run.round(number) as entry:
            merge: Merge | None = None

            def work() -> dict[str, Any]:
                nonlocal merge
                digest = self.exchange.parameter_digest()
                weight = self._weight(self._samples, self._tokens)
                merge = self._leader.merge(LocalWork(number, weight, step_s, self._batch_hash, final))
                self._note(merge, number)
                return {
                    "parts": merge.parts,
                    "members": len(merge.batch_hashes),
                    "share": merge.share,
                    "fastest_step_s": merge.fastest_step_s,
                    "digest": digest,
                }

            outcome = run.lead(work)
            if parts := outcome["parts"]:
                numel = sum(self._buckets[part].numel for part in parts)
                values = merge.values if merge else np.empty(numel, dtype=np.float32)
                run.local.broadcast(values)
                apply_merge(self._selection, self._buckets, parts, values, self._put)
            entry.update(outcome)
        steps = self._pace.steps(number, self._max_steps)
        self._every = self._pace.balanced(steps, step_s, outcome["fastest_step_s"]) // self._fragments
        self._forget()

    def _forget(self) -> None:
        """Nothing has been done since the last round."""
        self._steps = self._batch_hash = 0
        self._samples = self._tokens = self._seconds = 0.0


def rounds_for(run: Run, selection: Selection, optimizer: Any, max_steps: int) -> Rounds:
    """What ``sync_strategy`` asks for."""
    kinds = {"every_step": EveryStepRounds, "local_steps": LocalStepsRounds}
    return kinds[run.arguments.sync_strategy](run, selection, optimizer, max_steps)


def codec_for(arguments: NebulaArguments) -> Codec:
    """What ``sync_codec`` asks for, with error feedback if it loses anything and does not keep that itself."""
    codec: Codec = codec_from_spec(arguments.sync_codec)
    if codec.lossless or codec.own_feedback or not arguments.sync_error_feedback:
        return codec
    return ErrorFeedback(codec, arguments.sync_feedback_decay)
