"""What is said through doors: who has arrived, who is gone, and what one cluster tells another. No sockets, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.admission import Facts, arrivals, judge, run_facts
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.pulse import BEAT_S, Pulse
from paddlenlp_nebula.link.strangers import Refusals

__all__ = ["Event", "Switchboard"]

_STALE_S = 4 * BEAT_S  # a line that has been silent for so long makes way for a new one of the same cluster


@dataclass(frozen=True, slots=True)
class Event:
    """Something the door reports: ``kind`` is PORT, GONE, LEAVE or REFUSED; ``cluster`` who it is about.

    A REFUSED one without a cluster is about a stranger, and for the log alone.
    """

    kind: Kind
    cluster: str
    body: dict[str, Any]


class Switchboard:
    """The lines of one leader, and what passes through them.

    Args:
        cluster: this cluster's name.
        clusters: all names in order.
        timeout_s: seconds after which a silent line is dead at the latest, see `Pulse`.
        on_event: called with each event besides queueing it.

    Attributes:
        lines: to earlier clusters' doors, and those that have come to ours, strangers included.
        events: what has been reported and not been taken.
        ports: cluster -> the MPI port that it has opened for this one since the run has begun.
        facts: of this cluster's run, once it has begun.
        theirs: of a run that others have begun without this cluster, as soon as any of them has said so.
        closing: the door is being closed, and nobody let in.
    """

    def __init__(
        self, cluster: str, clusters: Sequence[str], timeout_s: float, on_event: Callable[[Event], None]
    ) -> None:
        self.cluster = cluster
        self.clusters = tuple(clusters)
        self.lines: list[Line] = []
        self.events: deque[Event] = deque()
        self.ports: dict[str, str] = {}
        self.facts: Facts | None = None
        self.theirs: Facts | None = None
        self.refusals = Refusals()
        self.closing = False
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._goodbyes: set[tuple[str, str]] = set()  # who has said goodbye to whom
        self._complete: set[str] = set()  # whose training is, as they have told us

    def arrived(self) -> set[str]:
        """The clusters that can be spoken to (this one included)."""
        return {self.cluster} | self.direct() | {name for line in self.lines for name in line.reaches}

    def direct(self) -> set[str]:
        """The clusters that there is a line to."""
        return {line.cluster for line in self.lines if line.cluster is not None}

    def adopt(self, line: Line, body: dict[str, Any]) -> None:
        """A line to an earlier door, where WELCOME has come with this body."""
        line.pulse = Pulse(self._timeout_s)
        self._welcome(line, body)
        self._forget(str(line.cluster))
        self.lines.append(line)

    def message(self, line: Line, kind: Kind, body: dict[str, Any]) -> None:
        """What has come through a line.

        Raises:
            ProtocolError: it is nothing that may come there.
            EOFError: who knocks is to come again later.
        """
        if line.pulse is not None:
            line.pulse.heard()
        if line.cluster is None:
            if kind is not Kind.KNOCK:
                raise ProtocolError(f"a stranger at the door must KNOCK first, got {kind.name}")
            self._admit(line, body)
        elif kind is Kind.BEAT:
            pass
        elif kind is Kind.WELCOME and line.leads_up:
            self._welcome(line, body)
        elif kind in (Kind.PORT, Kind.LEAVE) or (kind is Kind.GONE and line.leads_up):
            sender = body.get("from") if line.leads_up else line.cluster  # nobody speaks for another
            to = body.get("to")
            if sender not in self.clusters or to not in self.clusters:
                raise ProtocolError(f"a {kind.name} message must be from one cluster to another, got {sender} to {to}")
            self._deliver(line, kind, {**body, "from": sender, "to": to})
        else:
            raise ProtocolError(f"cluster {line.cluster!r} sent a {kind.name} message to the door, which expects none")

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        """To the cluster itself, or to the earliest door, which relays."""
        direct = [line for line in self.lines if line.cluster == body["to"]]
        upwards = sorted((line for line in self.lines if line.leads_up), key=self._place)
        for line in [*direct, *upwards][:1]:
            line.send(kind, body)

    def drop(self, line: Line, reason: str, category: str | None = None) -> None:
        """A line is no more; ``category``: that of a refusal, if it is a stranger's."""
        if line not in self.lines:
            return
        if line.cluster is not None:
            self._lose(line, reason)
            return
        self.lines.remove(line)
        if category is not None:
            self._count(line, reason, category)

    def refuse(self, line: Line, reason: str, category: str) -> None:
        """Turn a stranger away, and tell it why."""
        if not line.refused:
            line.send(Kind.REFUSED, {"reason": reason})
            line.refused = True
            self._count(line, reason, category)

    # Inside

    def _deliver(self, line: Line, kind: Kind, body: dict[str, Any]) -> None:
        """A message from one cluster to another, perhaps this one."""
        sender, to = body["from"], body["to"]
        if kind is Kind.GONE:
            line.reaches.discard(sender)
            if any(sender == other.cluster for other in self.lines):
                return  # we see ourselves whether it is
            self.ports.pop(sender, None)
        if kind is Kind.LEAVE:
            if not body.get("stays"):
                self._goodbyes.add((sender, to))
                line.reaches.discard(sender)  # of its end we will not be told again
                self.ports.pop(sender, None)
            if to == self.cluster and body.get("deliberate"):
                self._complete.add(sender)
        if to != self.cluster:
            for other in self.lines:
                if other.cluster == to and not (other.leads_up or line.leads_up):
                    other.send(kind, body)
        elif kind is Kind.PORT and self.facts is not None:
            self.ports[sender] = str(body.get("port"))
        else:
            self._report(Event(kind, sender, body))

    def _welcome(self, line: Line, body: dict[str, Any]) -> None:
        """An earlier door has let us in, or says who else has come."""
        line.reaches = set(arrivals(body, self.clusters)) - {self.cluster}
        self.theirs = run_facts(body) or self.theirs

    def _admit(self, line: Line, body: dict[str, Any]) -> None:
        name = body.get("cluster")
        if line.session is not None and not (isinstance(name, str) and name in line.session.names):
            shown = ", ".join(sorted(line.session.names)) or "no cluster"
            impostor = f"who knocks as {name!r:.80} must show a certificate for that cluster, got one for {shown:.80}"
            self.refuse(line, impostor, "a certificate for another name")
            return
        if self.closing or (isinstance(name, str) and name in self._complete):
            raise EOFError  # it comes for the script's next run, whose door this is not, and will knock again
        facts = run_facts(body)
        for old in [other for other in self.lines if other.cluster is not None and other.cluster == name]:
            if self.facts is not None and old.pulse is not None and old.pulse.silent_s > _STALE_S:
                self._lose(old, "it has come to the door anew")
        present = {other.cluster for other in self.lines if other.cluster is not None}
        if (refusal := judge(body, self.cluster, self.clusters, present, self.facts)) is not None:
            if refusal.concerns_run:
                self._report(Event(Kind.REFUSED, str(name), {"reason": refusal.reason}))
            self.refuse(line, refusal.reason, "a knock")
            return
        line.cluster = str(name)
        line.pulse = Pulse(self._timeout_s)
        if line.session is not None:
            line.session.peer = f"cluster {line.cluster!r}"
        self.theirs = facts or self.theirs
        self._forget(line.cluster)
        arrived = sorted(self.arrived())
        for other in self.lines:
            if other.cluster is not None and not other.leads_up:
                other.send(Kind.WELCOME, {"arrived": arrived, "run": self.facts})

    def _forget(self, cluster: str) -> None:
        """It has come (again): what was said in an earlier life does not matter any more.

        Its port goes when it goes: what comes may be one more line to a cluster that another door has relayed one of.
        """
        self._goodbyes = {pair for pair in self._goodbyes if cluster not in pair}

    def _lose(self, line: Line, reason: str) -> None:
        """A cluster's line is no more: tell those who have it through us alone."""
        self.lines.remove(line)
        gone = str(line.cluster)
        self.ports.pop(gone, None)
        # After a goodbye a closed connection is no news.
        if (gone, self.cluster) not in self._goodbyes and not self.closing:
            self._report(Event(Kind.GONE, gone, {"reason": reason}))
        for other in self.lines:
            if other.cluster and not (other.leads_up or line.leads_up) and (gone, other.cluster) not in self._goodbyes:
                other.send(Kind.GONE, {"from": gone, "to": other.cluster, "reason": reason})

    def _count(self, line: Line, reason: str, category: str) -> None:
        """Count a stranger that is turned away: for log and report alone, since nobody outside can end a run."""
        if self.refusals.note(category):
            count = self.refusals.counts[category]
            self._on_event(Event(Kind.REFUSED, "", {"reason": reason, "address": line.address, "count": count}))

    def _report(self, event: Event) -> None:
        self.events.append(event)
        self._on_event(event)

    def _place(self, line: Line) -> int:
        return self.clusters.index(str(line.cluster))
