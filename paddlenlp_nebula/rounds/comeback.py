"""Clusters that come back, inside a Trainer: who is to be met, and what every process takes over from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.buckets import cut
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.link.deadlines import Deadline
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import Selection
from paddlenlp_nebula.strategy.history import History
from paddlenlp_nebula.strategy.reunion import Bearings, Member, Plane, Reunion
from paddlenlp_nebula.tensors import Tensor, master_weight, unwrapped

__all__ = ["Comeback", "Takeover", "optimizer_state"]

_LOOK_S = 0.1


@dataclass(frozen=True)
class Takeover:
    """What every process of a cluster does after a reunion.

    Attributes:
        step: the optimizer step at which all clusters stand.
        parameters: new values of the selected parameters; None where they stay.
        states: of the optimizer's tensors; None where they stay.
    """

    step: int
    parameters: Float32Vector | None = None
    states: Float32Vector | None = None

    def outline(self) -> dict[str, Any]:
        """What the leader tells its local peers before the numbers (JSON)."""
        return {"step": self.step, "moves": self.parameters is not None, "adopts": self.states is not None}


@dataclass
class Comeback:
    """Watches for clusters that come back, on the leader, and meets them.

    Attributes:
        run: the clusters.
        history: what this cluster remembers of past rounds.
    """

    run: Run
    history: History = field(default_factory=History)
    _reunion: Reunion | None = None

    def due(self, guest: str | None = None, *, joins: bool = True) -> str | None:
        """The newcomer to be met now, between two steps, if there is one: this cluster itself, perhaps.

        Args:
            guest: one that all members have seen.
            joins: whether this cluster would go over to others.
        """
        run = self.run
        returns = run.party.returns
        if returns is None or run.ended is not None:
            return None
        if joins and returns.invitation(run.number) is not None:
            return run.arguments.cluster_name
        if not run.party.link.peers:  # what it would give has been neither noised nor masked
            return None if run.arguments.hides_updates else next(iter(run.party.candidates()), None)
        return guest

    def await_due(self, deadline: Deadline, *, expected: bool) -> str | None:
        """As `due`, on a cluster that is alone, but wait for it; ``expected``: only while somebody is on the way."""
        returns = self.run.party.returns
        while (newcomer := self.due()) is None and returns is not None and not deadline.passed():
            if expected and not returns.expected():
                break
            self.run.local.tick()
            time.sleep(_LOOK_S)
        return newcomer

    def await_last(self) -> str | None:
        """As `due`, on a cluster that has been alone until the end, but wait for one that is on its way."""
        returns = self.run.party.returns
        if returns is None or self.run.arguments.hides_updates:  # which invites nobody while it is alone
            return self.due()
        limit_s = min(returns.patience_s, self.run.arguments.sync_timeout_s)  # which bounds every wait
        return self.await_due(Deadline(limit_s), expected=True)

    def meet(
        self, newcomer: str, step: int, fields: Mapping[str, Any], member: Member, states: Selection | None
    ) -> Takeover | None:
        """Come together with a newcomer, or be one.

        Args:
            newcomer: what `due` has said.
            step: optimizer steps that this cluster has taken.
            fields: what must be equal on all clusters, see `handshake.compare`.
            member: the strategy.
            states: the optimizer's tensors that a newcomer takes over, too.

        Returns:
            What is to be done here; None if one side is gone again.

        Raises:
            HandshakeError: this cluster is the newcomer, and does not train the same thing.
        """
        run, party = self.run, self.run.party
        joins = newcomer == run.arguments.cluster_name
        alone = joins or not party.link.peers
        assert party.returns is not None
        if joins:
            if (invitation := party.returns.invitation(party.number)) is None:
                return None  # withdrawn meanwhile
            party.returns.accept(invitation)
            party.number = invitation.number
        elif member.exchange.diverged:
            return None  # what is known to be wrong takes nobody in
        else:
            party.returns.invite(newcomer, party.number)
        if alone:
            member.settle()
        # Merging a newcomer's own work takes its parameters as they are: not even that of the same round.
        limit = 0 if run.arguments.drops_work_done_alone else run.arguments.sync_staleness_limit
        reunion = self._reunion = self._reunion or Reunion(party.link, self.history, limit)
        bearings = Bearings(step, member.turns, fields, joins and member.exchange.diverged)
        planes = [*member.planes(), *([] if states is None else [_plane(states)])]
        parameters = Plane(member.exchange.buckets, member.brings)
        patience_s, began = party.returns.patience_s, time.monotonic()
        found = party.together(
            lambda number: reunion.attempt(number, newcomer, bearings, parameters, planes, patience_s)
        )
        reunion.done(complete=found is not None)
        if found is None:
            party.returns.missed(newcomer, time.monotonic() - began)
            return None
        party.returns.met(newcomer)
        if joins:
            member.exchange.diverged = False
        received = list(found.states)
        optimizer = received.pop() if received and states is not None else None
        moved = None if found.parameters is None else member.move(found.parameters, found.turns, received)
        if joins:
            self.history.forget_after(found.common)
        self.history.note(party.number, member.exchange.parameter_digest(), found.members)
        run.returned(found)
        return Takeover(found.step, moved, optimizer)


def optimizer_state(optimizer: Any, parameters: Sequence[Tensor]) -> Selection:
    """The optimizer's moments of some parameters, in an order that is the same on all clusters.

    Args:
        optimizer: as the Trainer's callbacks get it, wrapped; it has taken a step.
        parameters: the selected ones.
    """
    *_, innermost = unwrapped(optimizer)
    kinds: Mapping[str, Mapping[str, Tensor]] = innermost._accumulators
    # Paddle files the moments of a master weight under that one's name.
    masters = [master_weight(optimizer, parameter) for parameter in parameters]
    names = [(p if master is None else master).name for p, master in zip(parameters, masters, strict=True)]
    return Selection(
        [
            (f"{kind}.{index}", tensors[name])
            for kind, tensors in sorted(kinds.items())
            for index, name in enumerate(names)
            if name in tensors
        ]
    )


def _plane(states: Selection) -> Plane:
    return Plane(cut(states), lambda bucket: HOST.gather(bucket, states.parameters.__getitem__))
