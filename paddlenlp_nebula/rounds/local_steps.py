"""``local_steps`` inside a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddlenlp_nebula.checkpoint import Arrays
from paddlenlp_nebula.rounds.base import Rounds, Step, codec_for, final_codec_for
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, Merge, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.strategy.product import ProductMerge

__all__ = ["LocalStepsRounds"]


class LocalStepsRounds(Rounds):
    """`LocalSteps`: the members' changes are averaged every so many optimizer steps."""

    def __init__(self, run: Run, selection: Selection, optimizer: Any, max_steps: int) -> None:
        super().__init__(run, selection, optimizer, max_steps)
        self._pace = self._arguments.pace
        self._fragments = self._arguments.sync_fragments
        self._every = self._pace.steps(0, max_steps) // self._fragments
        self._steps = self._batch_hash = 0
        self._samples = self._tokens = self._seconds = 0.0
        self._final = False  # the last round has been

    def lead(self) -> None:
        arguments = self._arguments
        codec = codec_for(arguments)
        exchange = Exchange(
            self._selection,
            codec,
            self._run.party,
            self._fragments,
            self._source,
            self._backend,
            self._protection,
            resync=self._resync,
        )
        outer = OuterOptimizer(arguments.sync_outer, arguments.sync_outer_lr, arguments.sync_outer_momentum)
        self._leader = LocalSteps(
            exchange,
            outer,
            self._fragments,
            same_step=not self._pace.balance,
            final_codec=final_codec_for(arguments),
            keep_unsent=arguments.sync_keep_unsent,
            product=self._product(),
        )

    def after_step(self, step: Step) -> None:
        self._steps += 1
        self._samples += step.samples
        self._tokens += step.tokens
        self._seconds += step.seconds
        self._batch_hash = self._batch_hash or step.batch_hash
        self.comeback.history.work += self._weight(step.samples, step.tokens)
        last = step.number >= self._max_steps
        if last or self._steps >= self._every:
            self._meet(self._merge(step.number, final=last), step.number)
        self._watch(step.number)

    def before_end(self, step: int) -> None:
        # Also right after a round: the others must learn that it was our last one, before they wait for the next. And after
        # the last step if we have not come there step by step but with a cluster that has come back.
        if not self._final and self._run.ended is None:
            self._merge(step, final=True)

    def compare_final(self, step: int) -> None:
        if self._product() is None:  # otherwise each cluster has factors of its own
            self.exchange.refresh_digests()  # the best model, say, if that has been loaded
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

    def _product(self) -> ProductMerge | None:
        """How LoRA pairs are merged, if not like everything else."""
        return None

    def takes_back(self) -> str | None:
        if self._product() is None:
            return None
        return "sync_lora_merge='product' keeps what each cluster holds, which one that comes back has lost"

    def _met(self) -> None:
        self._final = False
        self._every = max(1, self._pace.steps(self._jump or 0, self._max_steps) // self._fragments)
        self._forget()

    def _merge(self, number: int, *, final: bool) -> str | None:
        """A round after optimizer step ``number``; returns whom to meet after it, see `Comeback.due`."""
        run = self._run
        if run.alone:
            self._forget()
            return None
        step_s = self._seconds / max(1, self._steps)
        with run.round(number) as entry:
            merge: Merge | None = None

            def work() -> dict[str, Any]:
                nonlocal merge
                digest = self.exchange.parameter_digest()
                weight = self._weight(self._samples, self._tokens)
                meets = not final or number >= self._max_steps
                merge = self._leader.merge(LocalWork(number, weight, step_s, self._batch_hash, final, meets))
                self._note(merge, number)
                if len(merge.batch_hashes) > 1:
                    self.comeback.history.note(run.number, self.exchange.parameter_digest(), merge.batch_hashes)
                return {
                    "newcomer": self.comeback.due(merge.guest, joins=not merge.final)
                    if meets and not merge.split
                    else None,
                    "parts": merge.parts,
                    "members": len(merge.batch_hashes),
                    "share": float(merge.shares[self._arguments.cluster_name]),
                    "fastest_step_s": merge.fastest_step_s,
                    "final": merge.final,
                    "digest": digest,
                    "update_norm": self._protection.norm,
                }

            outcome = run.lead(work)
            self._final = outcome["final"]
            if parts := outcome["parts"]:
                values = merge.values if merge else self._backend.flat([self._buckets[part].numel for part in parts])
                self._backend.broadcast(values, run.local)
                apply_merge(self._selection, self._buckets, parts, values, self._put)
            entry.update(outcome)
        steps = self._pace.steps(number, self._max_steps)
        steps = self._pace.balanced(steps, step_s, outcome["fastest_step_s"])
        self._every = max(1, steps // self._fragments)
        self._forget()
        newcomer: str | None = outcome["newcomer"]
        return newcomer

    def _forget(self) -> None:
        """Nothing has been done since the last round."""
        self._steps = self._batch_hash = 0
        self._samples = self._tokens = self._seconds = 0.0
