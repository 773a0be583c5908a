"""What the noise is worth: the epsilon of all rounds so far.

Neighbouring runs differ in one cluster, whose updates are all replaced by zero (the "zero-out" relation of Kairouz et
al. 2021, arXiv 2103.00039). A round with noise of standard deviation m times what that changes is then a Gaussian
mechanism of multiplier m, and rounds of m1, m2, ... together are one of (m1^-2 + m2^-2 + ...)^-1/2, also if each depends on
what the earlier ones gave: Dong, Roth and Su 2019, "Gaussian Differential Privacy" (arXiv 1905.02383), corollary 3.3.
Nothing is assumed to be sampled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddlenlp_nebula.atomic import replacing
from paddlenlp_nebula.errors import NebulaError

__all__ = ["Accountant", "sum_multiplier"]


class Accountant:
    """Counts rounds with noise.

    Args:
        noise_multiplier: standard deviation of the noise in the sum over all clusters, in units of the clip norm.
        clusters: how many share in it.
        delta: the probability of telling more than epsilon says.
        summed: the others add what they get as it is. Otherwise (a lossy codec) the noise of one cluster does not hide
            what another one sends, and each has its own alone.
        hidden: no other member sees a single update (secure aggregation).

    Attributes:
        rounds: in which something was sent, repeated ones counted each time.
    """

    def __init__(
        self, noise_multiplier: float, clusters: int, delta: float, *, summed: bool = True, hidden: bool = False
    ) -> None:
        self.own_multiplier = noise_multiplier / math.sqrt(clusters)
        self._delta = delta
        self._summed = summed
        self._hidden = hidden
        self._journal: Path | None = None
        self.rounds = 0
        # Squares of what Gaussian differential privacy calls mu.
        self._model = 0.0
        self._members = 0.0

    def spend(self, share: Mapping[str, Any]) -> None:
        """Count a round, before anything of it is sent.

        Args:
            share: member -> its weight in the average.
        """
        weights = [float(weight) for weight in share.values()]
        own = self.own_multiplier
        self.rounds += 1
        self._model += (sum_multiplier(own, weights) if self._summed else own) ** -2
        self._members += (_multiplier_among_members(own, weights) if self._hidden else own) ** -2
        if self._journal is not None:
            self._write(self._journal)

    def report(self) -> dict[str, float]:
        """What goes into the log and ``nebula_report.json``.

        ``privacy_epsilon`` holds for whoever sees the common parameters of all rounds, ``privacy_epsilon_members`` for
        another cluster, which sees what this one sends, and knows its own part of the noise.
        """
        return {
            "privacy_epsilon": self._epsilon(self._model),
            "privacy_epsilon_members": self._epsilon(self._members),
            "privacy_delta": self._delta,
            "privacy_rounds": self.rounds,
        }

    def scalars(self) -> dict[str, float]:
        """What is logged beside the training loss."""
        return {"nebula_privacy_epsilon": round(self._epsilon(self._model), 4)}

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps (JSON)."""
        return {"rounds": self.rounds, "model": self._model, "members": self._members}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from `state`, or from what has been counted by now, whichever is more."""
        self.rounds = max(self.rounds, int(state["rounds"]))
        self._model = max(self._model, float(state["model"]))
        self._members = max(self._members, float(state["members"]))

    def keep_journal(self, path: Path, *, resumed: bool) -> str | None:
        """Write every round to a file before it is sent: a checkpoint does not know of those between it and a crash.

        Args:
            path: this cluster's own file.
            resumed: go on from what the file holds already.

        Returns:
            A sentence, if such rounds may not be counted.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._journal = path
        if not resumed:
            return None
        try:
            self.restore(json.loads(path.read_text(), parse_constant=int))  # which takes neither NaN nor Infinity
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            return (
                f"{path} must hold the rounds with noise, and cannot be read ({error!r}): privacy_epsilon does not count "
                "those that were taken after the checkpoint"
            )
        return None

    def _write(self, path: Path) -> None:
        try:
            with replacing(path) as partial:
                partial.write_text(json.dumps(self.state()))
        except OSError as error:
            raise NebulaError(
                f"{path} must count each round with noise before it is sent, and cannot be written ({error.strerror}): "
                "make room for it"
            ) from error

    def _epsilon(self, square: float) -> float:
        from dp_accounting import get_epsilon_gaussian  # takes a second to load

        return float(get_epsilon_gaussian(square**-0.5, self._delta)) if square else 0.0


def sum_multiplier(own: float, weights: Iterable[float]) -> float:
    """Noise in a weighted sum, in units of what the heaviest member can add to it.

    Args:
        own: the same of a single member's update.
        weights: of the members, at least one.
    """
    weights = list(weights)
    return own * math.sqrt(sum(weight**2 for weight in weights)) / max(weights)


def _multiplier_among_members(own: float, weights: list[float]) -> float:
    """`sum_multiplier` for the worst case of a member that takes its own update and noise out of the sum."""
    others = [weights[:i] + weights[i + 1 :] for i in range(len(weights))]
    return min(sum_multiplier(own, rest) for rest in others)
