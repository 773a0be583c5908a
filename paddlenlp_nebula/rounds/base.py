"""What all strategies do inside a Trainer: the start, the end, and what a checkpoint keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.backend.backend import Vector
from paddlenlp_nebula.backend.choose import choose_backend
from paddlenlp_nebula.buckets import BUCKET_NUMEL
from paddlenlp_nebula.checkpoint import STATE_NAME, Arrays, load_state
from paddlenlp_nebula.codec.cast import Cast
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.evaluation import why_not_again
from paddlenlp_nebula.hello import optimizer_digest
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.privacy.choose import facts_for, protection_for
from paddlenlp_nebula.rounds.comeback import Comeback, Takeover
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection, frozen_digest, running_statistics
from paddlenlp_nebula.strategy.every_step import Average
from paddlenlp_nebula.strategy.exchange import Exchange, buckets_for
from paddlenlp_nebula.strategy.initial import spread_parameters
from paddlenlp_nebula.strategy.local_steps import Merge
from paddlenlp_nebula.tensors import Tensor, master_weight, write

# What clusters must have in common when they begin, but not when one of them comes back.
_OF_A_MOMENT = ("global_step", "lr_scheduler_state", "nebula_state", "optimizer_state")

__all__ = ["Rounds", "Step", "codec_for", "final_codec_for", "keeps_state"]


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

    Raises:
        ConfigurationError: the codec or the backend does not suit what travels.
    """

    only_host: str | None = None
    """Why vectors must be kept on the host whatever ``sync_backend`` says, if they must: see `choose_backend`."""

    def __init__(self, run: Run, selection: Selection, optimizer: Any, max_steps: int) -> None:
        self._run = run
        self._selection = selection
        self._parameters = selection.parameters
        self._optimizer = optimizer
        self._max_steps = max_steps
        self._arguments: NebulaArguments = run.arguments
        facts = facts_for(run.arguments)
        only_host = "privacy draws and adds its random numbers on the host" if facts else self.only_host
        self._backend, reason = choose_backend(run.arguments.sync_backend, selection.parameters, only_host)
        if reason is not None:
            run.degrade(reason, once=True)
        run.ledger.facts |= {"backend": self._backend.name, **facts}
        self._protection = protection_for(run.arguments, run.ledger.privacy, selection.names)
        self.comeback = Comeback(run)
        self._resync = run.arguments.sync_on_divergence == "resync"
        self._fields: dict[str, Any] = {}  # what must be equal on all clusters, also on one that comes back
        self._jump: int | None = None
        self._buckets = buckets_for(selection, codec_for(run.arguments), run.arguments.sync_fragments)
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

    # Clusters that come back

    def takes_back(self) -> str | None:
        """Why a cluster that is lost cannot come back, if it cannot; the same on every process."""
        return None

    def states(self) -> Selection | None:
        """The optimizer's tensors that a cluster that comes back takes over; None if it keeps its own."""
        return None

    def jump(self) -> int | None:
        """The step at which the clusters stand since they came together, once; None if they did not just now."""
        step, self._jump = self._jump, None
        return step

    def remembered(self) -> dict[str, Any] | None:
        """On the leader: past rounds, for a checkpoint; none if what they have led to is known to be wrong."""
        return None if self.exchange.diverged else self.comeback.history.state()

    def _watch(self, step: int) -> None:
        """After optimizer step ``step``, alone: meet whoever has come back.

        After the last step whoever is on the way, too, or what the two have learnt would end in two models; and one that
        is too few by itself, having been started anew, goes on with others only.
        """
        run, quorum = self._run, self._arguments.sync_quorum
        if not run.may_meet:
            return
        if quorum > 1:
            deadline = Deadline(self._arguments.sync_timeout_s)
            while run.alone and run.ended is None:
                newcomer = self._newcomer_by(lambda: self.comeback.await_due(deadline, expected=False))
                if newcomer is None:
                    raise NebulaError(
                        f"{quorum} clusters are needed (sync_quorum) but none has taken this one in within "
                        f"{deadline.timeout_s:g} s (sync_timeout_s): are the others still training?"
                    )
                self._meet(newcomer, step)
        elif run.alone:
            self._meet(
                self._newcomer_by(self.comeback.due if step < self._max_steps else self.comeback.await_last), step
            )

    def _newcomer_by(self, find: Callable[[], str | None]) -> str | None:
        """On every process whom the leader has found; its wait is no computation."""
        with self._run.exposed():
            newcomer: str | None = self._run.local.lead(find)
        return newcomer

    def _meet(self, newcomer: str | None, step: int) -> None:
        """Come together with a newcomer, or be one, if anybody is to be met: see `Comeback.due`."""
        if newcomer is not None:
            with self._run.exposed():
                self._take_over(newcomer, step)

    def _take_over(self, newcomer: str, step: int) -> None:
        run, states = self._run, self.states()
        takeover: Takeover | None = None

        def work() -> dict[str, Any]:
            nonlocal takeover
            takeover = self.comeback.meet(newcomer, step, self._fields, self._leader, states)
            return {"todo": None if takeover is None else takeover.outline()}

        todo = run.lead(work)["todo"]
        if todo is None:
            return
        own = takeover or Takeover(todo["step"])
        if todo["moves"]:
            self._write(_vector(own.parameters, self._selection))
        if todo["adopts"] and states is not None:
            tensors = states.parameters
            self._spread(states, _vector(own.states, states), lambda index, values: write(tensors[index], values))
        self._jump = todo["step"]
        self._met()

    def _met(self) -> None:
        """On every process: parameters are new, and all clusters begin anew from here."""
        return

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

    def prepare(self, model: Tensor, hello: Mapping[str, Any], step: int, number: int, state: Path | None) -> None:
        """Check that all clusters train the same thing, and make the selected parameters equal.

        Args:
            model: unwrapped, as the Trainer holds it.
            hello: what else must be equal on all clusters, see `handshake.compare`.
            step: optimizer steps taken before (from a checkpoint), else 0.
            number: exchanges completed by then; 0 also if none had been.
            state: this cluster's file in that checkpoint, if there is one.

        Raises:
            HandshakeError: on every cluster, with every difference.
        """
        run = self._run
        outcome: dict[str, Any] = {}
        several = len(self._arguments.cluster_names) > 1

        def keeps() -> bool:
            return step > 0 and bool(self.state())

        def describe() -> dict[str, Any]:
            self.lead()
            if state is not None:
                outcome.update(self.restore(load_state(state)))
            fields = {"selection": self._selection.fingerprint(), **hello}
            fields["nebula_state"] = "there" if state else "missing" if keeps() else None
            local = running_statistics(model) if several else {}
            if several:
                self._say_what_stays_local(list(local.values()))
                # Equal at the beginning, and each cluster's own in a checkpoint.
                fields["frozen"] = frozen_digest(model, self._parameters, run.local.tick, local if step else ())
                if step and self._arguments.sync_strategy == "every_step":
                    fields["known:optimizer_state"] = optimizer_digest(model, self._optimizer, run.local.tick)
            self._fields = {
                name: value for name, value in fields.items() if name.rpartition(":")[2] not in _OF_A_MOMENT
            }
            if several and local and not step:  # which differ by the time that somebody comes back
                self._fields["frozen"] = frozen_digest(model, self._parameters, run.local.tick, local)
            if self._arguments.sync_init == "verify" or fields["nebula_state"] == "there":
                fields["initial"] = self.exchange.parameter_digest()
            return fields

        reason = self.takes_back() or why_not_again(str(hello.get("evaluation")))
        run.prepare(describe, number, {"takes_back": reason or True, "max_steps": self._max_steps})
        kept = self._run.local.lead(lambda: {"keeps": keeps(), "restored": outcome})
        if kept["restored"]:
            self.restored(kept["restored"])
        if kept["keeps"] and state is None and self._arguments.hides_updates:
            raise NebulaError(
                f"the checkpoint of step {step} must hold {STATE_NAME}, got none: without it the first cluster would give its "
                "parameters to all others as they are, with nothing of privacy_* to hide what it learned since the last round"
            )
        if kept["keeps"] and state is None:
            run.degrade(
                f"the checkpoint of step {step} holds no {STATE_NAME}: what was not sent before is lost, "
                "and all clusters start again from the first one's parameters"
            )
        if not run.alone and not kept["restored"]:
            self._make_equal()

    def _make_equal(self) -> None:
        """Give all clusters the first one's selected parameters, unless they were to be equal already."""
        if self._arguments.sync_init == "verify":
            return
        values: Float32Vector = np.empty(self._selection.numel, dtype=np.float32)
        self._run.local.lead(lambda: spread_parameters(self.exchange, self._arguments.cluster_names[0], values))
        self._write(values)
        if self._run.local.is_leader:
            self._rebase()

    def _write(self, values: Float32Vector) -> None:
        """Put the leader's values, shape (selection.numel,), into every process' parameters."""
        self._spread(self._selection, values, self._put)

    def _spread(self, selection: Selection, values: Float32Vector, put: Callable[[int, Vector], None]) -> None:
        """Hand the leader's values to every process, which puts each tensor's into its place."""
        self._run.local.broadcast(values)
        for index in range(len(selection)):
            put(index, values[selection.offsets[index] : selection.offsets[index + 1]])

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

    def _source(self, index: int) -> Tensor:
        """Where the float32 values of a parameter are."""
        parameter = self._parameters[index]
        master = master_weight(self._optimizer, parameter)
        return parameter if master is None else master

    def _put(self, index: int, values: Vector) -> None:
        parameter = self._parameters[index]
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


def _vector(leaders: Float32Vector | None, selection: Selection) -> Float32Vector:
    """The leader's numbers, or room for them on another process."""
    return np.empty(selection.numel, dtype=np.float32) if leaders is None else leaders


def codec_for(arguments: NebulaArguments) -> Codec:
    """What ``sync_codec`` asks for, with error feedback if it loses anything and does not keep that itself."""
    codec: Codec = codec_from_spec(arguments.sync_codec)
    if codec.lossless or codec.own_feedback or not arguments.sync_error_feedback:
        return codec
    return ErrorFeedback(codec, arguments.sync_feedback_decay)


def final_codec_for(arguments: NebulaArguments) -> Codec | None:
    """What encodes the last round together with all that was not sent before, or None: a round like any other.

    By default only with ``sync_keep_unsent``, where what is unsent is a change that a cluster has made once: int8, or
    the run's own codec where that keeps more. Otherwise every round starts from the anchor again and much of what is
    unsent has been computed, and counted, several times: to add all of it at once would overshoot.
    """
    codec: Codec = codec_from_spec(arguments.sync_codec)
    if codec.lossless:
        return None
    if arguments.sync_final_codec is not None:
        return codec_from_spec(arguments.sync_final_codec)
    if not arguments.sync_keep_unsent:
        return None
    dense: Codec = codec_from_spec("int8")
    bucket = Layout.flat(BUCKET_NUMEL)
    return codec if isinstance(codec, Cast) and codec.estimate(bucket) > dense.estimate(bucket) else dense


def keeps_state(arguments: NebulaArguments) -> bool:
    """Whether a checkpoint is incomplete without `STATE_NAME`."""
    return arguments.sync_strategy == "local_steps" or bool(codec_for(arguments).init(Layout.flat(1)))
