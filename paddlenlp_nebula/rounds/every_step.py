"""``every_step`` inside a Trainer."""

from __future__ import annotations

from typing import Any

from paddlenlp_nebula.checkpoint import Arrays
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.hybrid import complete_gradients, owners
from paddlenlp_nebula.rounds.base import Rounds, Step, codec_for
from paddlenlp_nebula.rounds.comeback import optimizer_state
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.every_step import Average, Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.tensors import unwrapped

__all__ = ["EveryStepRounds"]


class EveryStepRounds(Rounds):
    """`EveryStep`: the members' gradients are averaged before each optimizer step."""

    _newcomer: str | None = None  # to be met after the step

    def lead(self) -> None:
        codec = codec_for(self._arguments)
        *_, innermost = unwrapped(self._optimizer)
        optimizer = type(innermost).__name__
        if codec.for_gradients and optimizer != "SGD":
            self._run.degrade(
                f"sync_codec={codec.spec!r} brings the momentum of plain SGD, and the optimizer is {optimizer}: use "
                "paddle.optimizer.SGD, or another codec",
                once=True,
            )
        exchange = Exchange(
            self._selection,
            codec,
            self._run.party,
            source=self._source,
            backend=self._backend,
            protection=self._protection,
            resync=self._resync,
        )
        self._leader = EveryStep(exchange)

    def before_step(self, step: Step) -> None:
        run = self._run
        if run.alone:
            return
        if step.scaled and self._arguments.privacy_noise_multiplier > 0:
            raise NebulaError(
                "privacy_noise_multiplier needs gradients without a loss scale, since every cluster tells the others when its own "
                "overflow, got fp16: use bf16"
            )
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
                    "newcomer": None if average.ended_by else self.comeback.due(average.guest),
                    "present": average.present,
                    "skip": bool(average.non_finite),
                    "members": len(average.batch_hashes),
                    "share": average.share,
                    "digest": self.exchange.parameter_digest(),
                    "update_norm": self._protection.norm,
                }

            outcome = run.lead(work)
            if outcome["members"] > 1:  # otherwise the average is what we have
                values = average.values if average else self._backend.flat([bucket.numel for bucket in self._buckets])
                self._backend.broadcast(values, run.local)
                apply_average(
                    self._selection,
                    values,
                    outcome["present"],
                    skip=outcome["skip"],
                    loss_scale=step.loss_scale,
                    backend=self._backend,
                )
            entry.update(outcome)
            self._newcomer = outcome["newcomer"]

    def after_step(self, step: Step) -> None:
        run = self._run
        history = self.comeback.history
        history.work += self._weight(step.samples, step.tokens)
        if run.local.is_leader and not run.alone:
            with run.exposed():
                self.exchange.refresh_digests()
                history.note(run.number, self.exchange.parameter_digest(), run.party.link.members)
        newcomer, self._newcomer = self._newcomer, None
        self._meet(newcomer, step.number)
        self._watch(step.number)

    def takes_back(self) -> str | None:
        if owners(self._optimizer) is None:
            return None
        return (
            "under sharding='stage1' no process has the optimizer's whole state, which a cluster that comes back needs"
        )

    def states(self) -> Selection | None:
        return optimizer_state(self._optimizer, self._parameters)

    def _met(self) -> None:
        if self._run.local.is_leader:
            self.exchange.refresh_digests()

    def compare_final(self, step: int) -> None:
        self.exchange.refresh_digests()
        if not self._run.alone and self._run.ended is None:
            self._leader.compare_final()

    def state(self) -> Arrays:
        return self.exchange.state()

    def restore(self, arrays: Arrays) -> dict[str, Any]:
        if other := next((name for name in arrays if not name.startswith("codec/")), None):
            raise NebulaError(
                f"the checkpoint must hold what sync_strategy='every_step' has not sent, got {other!r} of 'local_steps': "
                "resume with the strategy that it was written with"
            )
        self.exchange.restore(arrays)
        return {}
