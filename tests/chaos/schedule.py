"""What goes wrong, where, when and for how long: data, made from a seed, so that a failure can be played again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ANYTHING", "WITHOUT_RETURN", "Fault", "plan"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_step: it begins when the furthest cluster has taken this optimizer step.
        what: one of `ANYTHING`.
        target: the cluster; two of them for a pair.
        duration_s: until it is undone (a killed trainer: until the scheduler starts it again); 0 for what is done at
            once.
        noticed: whether the others must notice: it lasts longer than they wait, or ends a process.
        seed: what else is left to chance: which courier, which byte.
    """

    at_step: int
    what: str
    target: tuple[str, ...]
    duration_s: float
    noticed: bool
    seed: int

    def entry(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How long a kind of fault lasts, in units of ``sync_timeout_s``: from, to; and what follows from it."""

    deadlines: tuple[float, float]
    noticed: bool = False
    pair: bool = False


_BRIEFLY, _LONG, _WHILE = (0.2, 0.5), (1.6, 2.4), (0.5, 1.5)
_KINDS = {
    "kill trainer": _Kind((0.3, 1.5), noticed=True),
    "kill courier": _Kind((0.0, 0.0), noticed=True),
    "stop trainer briefly": _Kind(_BRIEFLY),
    "stop trainer": _Kind(_LONG, noticed=True),
    "stop courier briefly": _Kind(_BRIEFLY),
    "stop courier": _Kind(_LONG, noticed=True),
    "cut cluster briefly": _Kind(_BRIEFLY),
    "cut cluster": _Kind(_LONG, noticed=True),
    "cut pair briefly": _Kind(_BRIEFLY, pair=True),
    "cut pair": _Kind(_LONG, noticed=True, pair=True),
    "slow link": _Kind(_WHILE),
    "lossy link": _Kind(_WHILE),
    "damage below TCP": _Kind((0.0, 0.0)),
    # A byte of a payload, of MPI's own headers, of what TCP has sent twice: which of them, chance decides. What must
    # not happen is that somebody trains with it: digests tell.
    "damage above TCP": _Kind((0.0, 0.0)),
    "damage in memory": _Kind((0.0, 0.0), noticed=True),
}
ANYTHING = tuple(_KINDS)
"""All kinds of faults."""
WITHOUT_RETURN = tuple(
    what for what, kind in _KINDS.items() if not kind.noticed and not what.startswith("damage above")
)
"""Those after which all clusters are still together."""


def plan(
    seed: int,
    clusters: Sequence[str],
    *,
    steps: int,
    step_s: float,
    deadline_s: float,
    settle_s: float,
    kinds: Sequence[str] = ANYTHING,
    overlap: float,
) -> list[Fault]:
    """A schedule: all kinds in a shuffled order, then all again, until the steps are used up.

    Args:
        seed: the same seed and arguments give the same schedule.
        clusters: all of them.
        steps: of the whole training; the last ones are left in peace, so that everybody can return.
        step_s: how long a step takes, at least.
        deadline_s: the clusters' ``sync_timeout_s``.
        settle_s: time between two faults for everybody to return.
        kinds: of faults.
        overlap: share of the faults that do not wait for the one before to end.
    """
    chance = random.Random(seed)
    at, faults, bag = 2 * settle_s, list[Fault](), list[str]()
    while True:
        if not bag:
            bag = chance.sample(list(kinds), len(kinds))
        what = bag.pop()
        kind = _KINDS[what]
        target = chance.sample(list(clusters), 2 if kind.pair else 1)
        duration_s = round(deadline_s * chance.uniform(*kind.deadlines), 2)
        # Whoever notices at the end of the deadline has then still to settle with the rest, and to come back.
        over = duration_s + settle_s * (2 if kind.noticed else 1)
        if at + over > steps * step_s - 4 * settle_s:
            return faults
        faults.append(
            Fault(int(at / step_s), what, tuple(sorted(target)), duration_s, kind.noticed, chance.randrange(1 << 31))
        )
        at += (0.3 * over if chance.random() < overlap else over) * chance.uniform(0.8, 1.2)
