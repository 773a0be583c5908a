"""What is said at the door: who may come in, who has arrived, and what a run that has begun is training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION

__all__ = ["Facts", "Refusal", "arrivals", "judge", "run_facts"]

Facts = dict[str, Any]
"""What a cluster must know of a run that has begun without it, in JSON; at least ``takes_back``."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why somebody is turned away.

    Attributes:
        reason: a sentence.
        concerns_run: the clusters do not fit together: those who are still meeting must know.
    """

    reason: str
    concerns_run: bool = False


def judge(
    body: Mapping[str, Any], cluster: str, clusters: Sequence[str], present: Collection[str], facts: Facts | None
) -> Refusal | None:
    """Whether to let in who knocks.

    Args:
        body: its KNOCK message.
        cluster, clusters: the door's own cluster, and all in order.
        present: clusters that are at the door already.
        facts: of the run, once it has begun.
    """
    name, theirs, protocol = body.get("cluster"), body.get("clusters"), body.get("protocol")
    place = clusters.index(cluster)
    may_knock = name in clusters[place + 1 :]
    is_new = may_knock and name not in present
    if protocol != PROTOCOL_VERSION:
        return Refusal(
            f"cluster {cluster!r} speaks protocol version {PROTOCOL_VERSION} but cluster {name!r:.80} "
            f"{protocol!r:.80}: install the same release of paddlenlp-nebula on all clusters",
            concerns_run=is_new and facts is None,
        )
    if theirs != list(clusters):
        return Refusal(
            f"cluster {cluster!r} has clusters={list(clusters)} but cluster {name!r:.80} has "
            f"clusters={theirs!r:.800}: set the same clusters, in the same order, on all of them",
            concerns_run=is_new and facts is None,
        )
    if not may_knock:
        return Refusal(
            f"{name!r:.80} cannot knock: clusters are {', '.join(clusters)}, and the earlier one keeps the door"
        )
    if not is_new:
        return Refusal(f"cluster {name!r} is already in the run: is it started twice?")
    if facts is not None and facts["takes_back"] is not True:
        return Refusal(f"the run has already started without it: {facts['takes_back']}")
    return None


def arrivals(body: Mapping[str, Any], clusters: Sequence[str]) -> list[str]:
    """The clusters that a WELCOME message names.

    Raises:
        ProtocolError: they are not clusters of the run.
    """
    names = body.get("arrived")
    if not isinstance(names, list) or any(name not in clusters for name in names):
        raise ProtocolError(f"a WELCOME message must name clusters of the run, got {names!r:.80}")
    return names


def run_facts(body: Mapping[str, Any]) -> Facts | None:
    """The facts of the run that a KNOCK or WELCOME message speaks of, or None if it has not begun.

    Raises:
        ProtocolError: they are none.
    """
    facts = body.get("run")
    if facts is not None and (not isinstance(facts, dict) or "takes_back" not in facts):
        raise ProtocolError(f"a run that has begun must be described by an object with takes_back, got {facts!r:.80}")
    return facts
