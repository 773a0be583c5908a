"""What a cluster remembers of past rounds: enough to tell, when clusters come together again, what each has done since."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from paddlenlp_nebula.errors import ProtocolError

__all__ = ["Entry", "History", "last_common", "parse_entries", "since"]

_KEPT = 64
_PINNED = 64


class Entry(NamedTuple):
    """A completed round.

    Attributes:
        number: of the exchange.
        digest: of all selected parameters after it.
        work: samples or tokens that this cluster had trained on by then, of all that it ever has.
    """

    number: int
    digest: str
    work: float


class History:
    """The last rounds, and those after which somebody was lost or a checkpoint was written.

    Attributes:
        work: samples or tokens (steps with ``sync_weight=equal``) that this cluster has trained on so far.
    """

    def __init__(self) -> None:
        self.work = 0.0
        self._recent: deque[Entry] = deque(maxlen=_KEPT)
        self._pinned: deque[Entry] = deque(maxlen=_PINNED)
        self._members: set[str] = set()  # of the last round

    def note(self, number: int, digest: str, members: Collection[str]) -> None:
        """A round has been completed by these members; the one before is kept if it was somebody's last."""
        unknown = not self._members  # after a checkpoint
        if self._recent and (unknown or not self._members <= set(members)):
            self._pinned.append(self._recent[-1])
        self._members = set(members)
        self._recent.append(Entry(number, digest, self.work))

    def pin(self) -> None:
        """Keep the last round: a checkpoint is written after it, and whoever starts from that must find it here."""
        if self._recent and self._recent[-1] not in self._pinned:
            self._pinned.append(self._recent[-1])

    def forget_after(self, number: int | None) -> None:
        """Go over to another group: what there was after the last round that both know is none of its past."""
        for entries in (self._recent, self._pinned):
            kept = [entry for entry in entries if number is not None and entry.number <= number]
            entries.clear()
            entries.extend(kept)

    def entries(self) -> list[Entry]:
        """What is remembered, oldest first."""
        return sorted({*self._recent, *self._pinned})

    def state(self) -> dict[str, Any]:
        """For a checkpoint (JSON)."""
        return {"work": self.work, "recent": list(self._recent), "pinned": list(self._pinned)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's.

        Raises:
            ProtocolError: it is not what `state` makes.
        """
        recent, pinned = (parse_entries(state.get(name), "the checkpoint") for name in ("recent", "pinned"))
        work = state.get("work")
        if not isinstance(work, int | float) or not 0 <= work <= sys.float_info.max:
            raise ProtocolError(f"the checkpoint must say how much has been trained on, got {work!r:.80}")
        self.work = float(work)
        for kept, entries in ((recent, self._recent), (pinned, self._pinned)):
            entries.clear()
            entries.extend(kept)


def parse_entries(value: Any, sender: str) -> list[Entry]:
    """Entries in JSON.

    Raises:
        ProtocolError: they are none.
    """
    try:
        entries = [Entry(int(number), str(digest), float(work)) for number, digest, work in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(
            f"the rounds that {sender} remembers must be [number, digest, work], got {value!r:.80}"
        ) from error
    if len(entries) > _KEPT + _PINNED or any(not 0 <= entry.work < float("inf") for entry in entries):
        raise ProtocolError(
            f"{sender} must remember at most {_KEPT + _PINNED} rounds of finite work, got {value!r:.80}"
        )
    return sorted(entries)


def last_common(one: Sequence[Entry], other: Sequence[Entry]) -> int | None:
    """The number of the last round that both have been through together; None if they remember none."""
    common = {entry[:2] for entry in one} & {entry[:2] for entry in other}
    return max((number for number, _ in common), default=None)


def since(entries: Sequence[Entry], work: float, number: int) -> float:
    """What a cluster has trained on since a round: since it joined, if it was not there then.

    Args:
        entries: what it remembers.
        work: what it has trained on in all.
        number: of the round.
    """
    before = [entry.work for entry in entries if entry.number <= number] or [entry.work for entry in entries[:1]]
    return max(0.0, work - before[-1]) if before else 0.0
