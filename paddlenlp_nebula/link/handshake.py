"""The handshake: before anything is trained, every cluster says what it is about to train.

Any difference is one sentence, the same on every cluster, naming both values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paddlenlp_nebula.errors import HandshakeError
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Kind
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.link import Link

__all__ = ["check_same", "compare", "shake_hands"]

_OTHER_RUN = "their checkpoints are not of one run: resume all clusters from the same checkpoint, or none"
_REMEDY = {
    "protocol": "install the same release of paddlenlp-nebula on all clusters",
    "selection": "the selected parameters' names, shapes, dtypes or order differ: build the same model on all clusters",
    "frozen": "the parameters that do not travel differ, and no exchange would ever repair that: start from the same "
    "weights and the same seed",
    "initial": "the selected parameters differ at the start: use sync_init=broadcast, or the same weights and seed",
    "max_steps": "set the same max_steps on all clusters, or use NebulaTrainer, which agrees on it",
    "global_step": "resume all clusters from the same checkpoint, or set sync_resume=common with NebulaTrainer",
    "nebula_state": "put the cluster's own nebula_state.safetensors back into its checkpoint, or take it out of everybody's",
    "round": _OTHER_RUN,
    "optimizer_state": _OTHER_RUN,
    "lr_scheduler_state": _OTHER_RUN,
    "evaluation": "evaluate at the same steps: set evaluation_strategy=steps and the same eval_steps on all clusters",
    "output_dir": "two clusters on one machine must not share a folder: give each its own output_dir",
}
# Differences that another one explains.
_FOLLOWS = {
    **{key: {"global_step"} for key in ("round", "known:optimizer_state", "lr_scheduler_state", "nebula_state")},
    "frozen": {"selection"},
    "initial": {"selection", "sync_init", "global_step", "nebula_state"},
}


def compare(hellos: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each field in which some cluster differs from the first.

    Args:
        hellos: for each cluster, in order, its fields. Fields named in the form ``unique:NAME``
            must differ between clusters, those in the form ``known:NAME`` must be equal on the
            clusters that know them (not None), and all others must be equal.
    """
    names = list(hellos)
    first = hellos[names[0]]
    problems = []
    differ = {key for hello in hellos.values() for key, value in hello.items() if value != first.get(key)}
    for key in dict.fromkeys(key for hello in hellos.values() for key in hello):
        rule, _, field = key.rpartition(":")
        remedy = _REMEDY.get(field, f"set the same {field} on all clusters")
        if rule == "unique":
            seen: dict[str, str] = {}
            for name in names:
                text = json.dumps(hellos[name].get(key))
                if text in seen:
                    problems.append(f"clusters {seen[text]!r} and {name!r} both have {field}={text}: {remedy}")
                seen[text] = name
            continue
        if _FOLLOWS.get(key, set()) & differ:
            continue
        given = [(name, hellos[name].get(key)) for name in names]
        if rule == "known":
            given = [(name, value) for name, value in given if value is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                problems.append(
                    f"cluster {given[0][0]!r} has {field}={given[0][1]!r} but cluster {name!r} has {field}={value!r}: {remedy}"
                )
                break
    return problems


def shake_hands(link: Link, hello: Mapping[str, Any]) -> None:
    """Exchange what this cluster is about to train with all others and compare.

    Args:
        link: a link to all clusters.
        hello: field name -> value (JSON), see `compare`.

    Raises:
        HandshakeError: on every cluster, with every difference.
        PeerLost: a cluster went away or said nothing in time.
    """
    hellos = all_gather_notes(link, {"protocol": PROTOCOL_VERSION, **hello}, kind=Kind.HELLO)
    if problems := compare(hellos):
        raise HandshakeError("the clusters do not train the same thing: " + "; ".join(problems))


def check_same(notes: Mapping[str, Mapping[str, Any]], key: str, remedy: str) -> Any:
    """The value all members gave for ``key``.

    Raises:
        HandshakeError: they differ.
    """
    values = {name: note[key] for name, note in notes.items()}
    if len(set(values.values())) > 1:
        raise HandshakeError(f"all clusters must have the same {key}, got {values}: {remedy}")
    return next(iter(values.values()))
