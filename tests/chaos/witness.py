"""What the clusters say about it, as long as the run lasts, and what is to be made of that."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.schedule import Fault

__all__ = ["Done", "Return", "Said", "Witness", "needless", "unreported"]

_LOSS = re.compile(r"cluster '(\w+)' (?:was lost|is gone)")
_RETURN = re.compile(r"cluster '(\w+)' is back at exchange (\d+): (?:it brings nothing|the (\S+) \w+ .* are (\w+))")


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence in a cluster's report, and when it was first read there (seconds, monotonic)."""

    at: float
    cluster: str
    sentence: str

    @property
    def lost(self) -> str | None:
        """The cluster whose loss it is about."""
        found = _LOSS.search(self.sentence)
        return found[1] if found else None

    @property
    def back(self) -> Return | None:
        """The return that it is about."""
        if (found := _RETURN.search(self.sentence)) is None:
            return None
        return Return(found[1], int(found[2]), float(found[3] or 0), found[4] == "merged")


class Return(NamedTuple):
    """A cluster has come back.

    Attributes:
        cluster: who.
        exchange: by which exchange.
        work: samples that it has trained on alone.
        merged: they are in the common parameters.
    """

    cluster: str
    exchange: int
    work: float
    merged: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was injected.

    Attributes:
        fault: which.
        began, ended: from when to when, seconds, monotonic.
        together: those that it hit were not alone at that moment: otherwise nobody could notice.
    """

    fault: Fault
    began: float
    ended: float
    together: bool = True


class Witness:
    """Reads the reports again and again: what a cluster has said before it was killed counts too.

    Attributes:
        said: everything that was new in a report's ``degradations``.
        rounds: cluster -> round number -> its entry in ``per_round``.
        members: cluster -> who was with it when it last wrote its report.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.said: list[Said] = []
        self.rounds: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in folders}
        self.members: dict[str, list[str]] = {name: [] for name in folders}
        self._folders = dict(folders)
        self._known: dict[str, Counter[str]] = {name: Counter() for name in folders}
        self._read: dict[str, int] = {}

    def look(self) -> None:
        for name, folder in self._folders.items():
            path = folder / "out" / "nebula_report.json"
            with suppress(FileNotFoundError, ValueError):
                changed = path.stat().st_mtime_ns
                if changed != self._read.get(name):
                    self._read[name] = changed
                    self._take(name, json.loads(path.read_text()))

    def together(self, fault: Fault) -> bool:
        """Whether those that a fault is about to hit are with others (a pair: with each other)."""
        others = fault.target[1:] or [name for name in self.members if name not in fault.target]
        return any(fault.target[0] in self.members[other] for other in others)

    def _take(self, name: str, report: Mapping[str, Any]) -> None:
        sentences = Counter(report["degradations"])
        for sentence in (sentences - self._known[name]).elements():
            self.said.append(Said(time.monotonic(), name, sentence))
        self._known[name] = sentences  # after a restart it may be fewer
        self.members[name] = report["members"]
        for entry in report["per_round"]:
            self.rounds[name].setdefault(entry["round"], entry)


def unreported(done: Iterable[Done], said: Sequence[Said], deadline_s: float) -> list[Done]:
    """The faults that somebody must have noticed, and nobody has said so.

    Args:
        done: what was injected.
        said: what was reported.
        deadline_s: the clusters' ``sync_timeout_s``.
    """

    def names(fault: Fault, word: Said) -> bool:
        # What breaks between two clusters either may report, and the rest may decide which of the two to keep.
        between = "courier" in fault.what or "damage" in fault.what or len(fault.target) == 2
        return word.lost in fault.target or (between and word.cluster in fault.target and word.lost is not None)

    def heard(one: Done) -> bool:
        patience_s = 2 * deadline_s + 10
        return any(one.began <= word.at <= one.ended + patience_s and names(one.fault, word) for word in said)

    return [one for one in done if one.fault.noticed and one.together and not heard(one)]


def needless(done: Sequence[Done], said: Sequence[Said], deadline_s: float) -> list[Said]:
    """The losses that were reported although nothing that must be noticed was going on."""
    harmful = [one for one in done if one.fault.noticed or one.fault.what == "damage above TCP"]
    patience_s = 2 * deadline_s + 10
    return [
        word
        for word in said
        if word.lost and not any(one.began <= word.at <= one.ended + patience_s for one in harmful)
    ]
