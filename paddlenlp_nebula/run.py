"""A run: one process' part in training together, from meeting the others to saying goodbye.

Every local process has a Run; only the leader's holds a link. What the leader learns from other
clusters reaches its local peers through `LocalGroup.lead`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paddlenlp.utils.log import logger

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.ledger.ledger import Ledger, Round
from paddlenlp_nebula.link.door import Event
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.handshake import shake_hands
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.link.rendezvous import open_link
from paddlenlp_nebula.link.returns import Returns
from paddlenlp_nebula.link.throughput import Throughput
from paddlenlp_nebula.local import LocalGroup
from paddlenlp_nebula.security.check import open_identity
from paddlenlp_nebula.security.identity import Credentials, Identity
from paddlenlp_nebula.strategy.reunion import Reunited

__all__ = ["Run"]

_SECURITY = {
    "tls": "tls (TLS 1.3 with certificates on both sides)",
    "none": "none (nothing on the links is encrypted or authenticated)",
}

_Notes = dict[str, dict[str, Any]]


class Run:
    """This process' part in a run of several clusters.

    Args:
        arguments: the user's settings.
        ledger: where everything is counted.

    Attributes:
        local: this cluster's processes.
        alone: no other cluster is in the run (any more); nothing is exchanged.
        ended: why another cluster has ended training for everybody, or None.
        theirs: the facts of a run that the others have begun without this cluster, which comes back to it, or None.
        may_meet: clusters that were lost can come back.
    """

    def __init__(self, arguments: NebulaArguments, ledger: Ledger) -> None:
        self.arguments = arguments
        self.ledger = ledger
        self.local = LocalGroup()
        self.alone = False
        self.ended: str | None = None
        self.theirs: dict[str, Any] | None = None
        self.may_meet = False
        self._link: Link | None = None
        self._party: Party | None = None
        self._prepared = False
        self._leaving = False
        self._throughput = Throughput()

    # Meeting

    def join(self) -> None:
        """Meet the other clusters.

        Raises:
            NebulaError: somebody is missing; HandshakeError: refused at the door.
        """
        names = self.arguments.cluster_names
        self._say(
            f"cluster {self.arguments.cluster} of {', '.join(names)}: meeting at {self.arguments.rendezvous}; "
            f"security: {_SECURITY[str(self.arguments.sync_security)]}"
        )
        joined = self.local.lead(self._join)
        self.alone, self.theirs = joined["alone"], joined["theirs"]

    def notes(self, note: Mapping[str, Any], check: Callable[[_Notes], _Notes] = lambda notes: notes) -> dict[str, Any]:
        """Exchange a small JSON object with all members; every local process gets member -> object.

        Args:
            note: this cluster's.
            check: called on the leader once training has begun; returns all, or raises PeerLost for whose is none.

        Raises:
            PeerLost: a cluster is lost although training has not begun: nobody would gain by going on.
        """

        def exchange() -> dict[str, Any]:
            party = self.party
            if not self._prepared:
                return {"notes": all_gather_notes(party.link, note)}
            return {"notes": party.together(lambda number: check(all_gather_notes(party.link, note, round=number)))}

        return dict(self.lead(exchange)["notes"])

    def prepare(self, describe: Callable[[], Mapping[str, Any]], number: int, facts: Mapping[str, Any]) -> None:
        """Check that all clusters train the same thing.

        Args:
            describe: called on the leader: the fields that must be equal on all clusters, see `handshake.compare`.
            number: exchanges completed before (from a checkpoint).
            facts: what a cluster must know that comes back later, see `Door.begin`.

        Raises:
            HandshakeError: on every cluster, with every difference.
        """

        def work() -> None:
            party = self.party
            party.number = number
            party.link.measure_rtt()
            if party.link.rtt_s:
                self.ledger.rtt_ms = 1000 * max(party.link.rtt_s.values())
            shake_hands(party.link, {"round": number, **describe()})
            self._count_bytes()
            self._await_returns(facts)

        self.local.lead(work)
        door = self.arguments.rendezvous not in ("world", "loopback") and len(self.arguments.cluster_names) > 1
        self.may_meet = door and facts["takes_back"] is True
        self._prepared = True
        self.ledger.status = "training"
        self.ledger.members = self.arguments.cluster_names

    # Training

    def lead(self, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Let the leader do something with the others; every local process gets the outcome, and who is left."""
        outcome: dict[str, Any] = self.local.lead(lambda: {**work(), **self._standing()})
        self.alone, self.ended = outcome.pop("alone"), outcome.pop("ended")
        return outcome

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the time as lost to the exchange."""
        start = time.perf_counter()
        yield
        self.ledger.seconds_exposed += time.perf_counter() - start

    @contextlib.contextmanager
    def round(self, step: int) -> Iterator[dict[str, Any]]:
        """Record a round after optimizer step ``step``; it is to be filled in with members, share and digest."""
        if self._link is not None:
            self._count_bytes()  # what was said since the last round is not this one's
        waited = self._link.seconds_waiting if self._link else 0.0
        start = time.perf_counter()
        entry: dict[str, Any] = {}
        yield entry
        if self._link is None or not entry["members"]:
            return
        seconds = time.perf_counter() - start
        sent, received = self.ledger.bytes_sent, self.ledger.bytes_received
        self._count_bytes()
        self.ledger.record(
            Round(
                round=self.number,
                step=step,
                members=len(self._link.members),
                weight=entry["share"],
                bytes_sent=self.ledger.bytes_sent - sent,
                bytes_received=self.ledger.bytes_received - received,
                seconds_exposed=seconds,
                seconds_waiting=self._link.seconds_waiting - waited,
                digest=entry["digest"],
                update_norm=entry.get("update_norm"),
            )
        )

    def agree_on_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean over the members of each metric (a plain mean, in the configured order)."""
        start = time.perf_counter()
        notes = self.notes({"metrics": dict(metrics)}, _with_metrics)
        self.ledger.seconds_exposed += time.perf_counter() - start  # above all waiting for the slowest evaluation
        if self._link is not None:
            self._count_bytes()
        agreed = {}
        for key in dict.fromkeys(key for note in notes.values() for key in note["metrics"]):
            values = [note["metrics"].get(key) for note in notes.values()]
            if any(not isinstance(value, int | float) for value in values):
                raise NebulaError(
                    f"all clusters must compute the metric {key!r} to agree on it, got "
                    f"{ {name: note['metrics'].get(key) for name, note in notes.items()} }: use the same compute_metrics"
                )
            agreed[key] = sum(values) / len(values)
        return agreed

    # Leaving

    def finish(self, compare: Callable[[], str]) -> None:
        """Training is complete: part.

        Args:
            compare: called on the leader: compares the parameters a last time and returns their digest.
        """

        def work() -> None:
            self.ledger.parameter_digest = compare()
            if apart := [name for name in self.arguments.cluster_names if name not in self.party.link.members]:
                names = ", ".join(apart)
                self.degrade(
                    f"training ends without {names}: what they have learnt since they were lost is not in this model"
                )
            self._standing()
            self.leave("its training is complete", deliberate=True)

        self.local.lead(work)
        self.ledger.status = "done"

    def leave(self, reason: str, *, deliberate: bool) -> None:
        """Tell the others the reason and close the link, whatever happens. Does nothing the second time."""
        if self._leaving:
            return
        self._leaving = True
        if not deliberate:
            self.ledger.status = "failed"
            self.ledger.facts["failure"] = reason
        if self._link is None:
            return
        returns = self._party.returns if self._party is not None else None
        if returns is not None and deliberate:
            returns.close()  # or it might knock at the door of the script's next run, as if this one went on
        try:
            self._link.leave(reason, deliberate=deliberate)
        except Exception as error:
            if deliberate:
                raise
            logger.warning(f"nebula: saying goodbye failed with {error!r}")  # the first error matters more
        finally:
            if returns is not None:
                returns.close()
            self._link.close()
            self._count_bytes()

    def returned(self, found: Reunited) -> None:
        """On the leader: a cluster has come back, this one or another."""
        self.ledger.members = found.members
        unit = {"samples": "samples", "tokens": "tokens", "equal": "steps"}[self.arguments.sync_weight]
        work = f"the {found.work:g} {unit} that it has trained on alone"
        if found.common is None:
            fate = (
                f"{work} are dropped: it remembers no round that the others do" if found.work else "it brings nothing"
            )
        elif found.diverged:
            fate = f"{work} are dropped: its parameters had come to differ from those of the majority"
        elif not found.share and found.work:
            why = "privacy" if self.arguments.drops_work_done_alone else "sync_staleness_limit"
            fate = f"{work} are dropped, after {found.apart} rounds ({why})"
        else:
            fate = f"{work} are merged, with a share of {found.share:.3f}"
        left = ", ".join(found.members)
        self.degrade(f"cluster {found.newcomer!r} is back at exchange {self.number}: {fate}; members now: {left}")
        self._event("returned", found.newcomer, fate)

    def degrade(self, sentence: str, *, once: bool = False) -> None:
        """Note in the ledger and in the log that something went less well than asked for; ``once``: unless noted."""
        if once and sentence in self.ledger.degradations:
            return
        self.ledger.degrade(sentence)
        logger.warning(f"nebula: {sentence}")

    @property
    def number(self) -> int:
        """Completed exchanges (on the leader)."""
        return self._party.number if self._party is not None else 0

    # Inside

    def _join(self) -> dict[str, Any]:
        arguments = self.arguments
        self._link = open_link(
            arguments.cluster_name,
            arguments.cluster_names,
            str(arguments.rendezvous),
            timeout_s=arguments.sync_timeout_s,
            on_event=self._on_event,
            on_wait=self.local.tick,
            say=self._say,
            identity=self._identity(),
        )
        self._party = Party(
            self._link,
            on_loss=arguments.sync_on_loss,
            quorum=arguments.sync_quorum,
            report=self.degrade,
            on_change=self._event,
        )
        theirs = self._link.door.theirs if self._link.door is not None else None
        if self._link.peers:
            self._say(f"all {len(arguments.cluster_names)} clusters have met")
        elif theirs is not None:
            self.degrade("the run has begun without this cluster: it trains alone until the others take it back")
        return {"alone": not self._link.peers, "theirs": theirs}

    def _await_returns(self, facts: Mapping[str, Any]) -> None:
        """From here on clusters that are lost may come back, if the facts say so."""
        link = self.party.link
        if link.door is None:
            return
        link.door.begin(dict(facts))
        if facts["takes_back"] is True:
            credentials = None if link.door.identity is None else link.door.identity.credentials
            self.party.returns = Returns(link, credentials, lambda sentence: self.degrade(sentence, once=True))

    def _event(self, what: str, cluster: str, reason: str) -> None:
        self.ledger.event(what, cluster, self.number, reason)

    def _identity(self) -> Identity | None:
        arguments = self.arguments
        if arguments.sync_security != "tls":
            return None
        paths = (os.path.abspath(str(path)) for path in (arguments.tls_ca, arguments.tls_cert, arguments.tls_key))
        files = Credentials(arguments.cluster_name, *paths)  # couriers have another working directory
        return open_identity(
            files, arguments.tls_key_passphrase_file, lambda sentence: self.degrade(sentence, once=True)
        )

    @property
    def party(self) -> Party:
        """The members, on the leader."""
        assert self._party is not None, "join() comes first"
        return self._party

    def _standing(self) -> dict[str, Any]:
        """Who is left after an exchange, for the local peers and for the report."""
        party = self.party
        if self._prepared:
            self.ledger.members = party.link.members
        return {"alone": not party.link.peers, "ended": party.ended}

    def _count_bytes(self) -> None:
        assert self._link is not None
        self.ledger.count_bytes(dict(self._link.bytes_sent), dict(self._link.bytes_received))
        self._link.bytes_sent.clear()
        self._link.bytes_received.clear()
        self.ledger.refused_connections = self._link.refusals
        for channel in self._link.channels.values():
            while channel.notes:
                self.degrade(channel.notes.popleft(), once=True)
        self._throughput.look(self._link.channels)
        if (rate := self._throughput.mbit_s) is not None:
            self.ledger.link_mbit_s = max(rate, self.ledger.link_mbit_s or 0.0)

    def _on_event(self, event: Event) -> None:
        if self._leaving or event.kind is Kind.PORT or event.body.get("deliberate"):
            return
        if not event.cluster:
            count, address = event.body["count"], event.body["address"]
            logger.warning(f"nebula: refused at the door, {address} (no. {count} of its sort): {event.body['reason']}")
            return
        what = "was refused" if event.kind is Kind.REFUSED else "is gone"
        logger.warning(f"nebula: cluster {event.cluster} {what}: {event.body.get('reason')}")

    def _say(self, sentence: str) -> None:
        if self.local.is_leader:
            logger.info(f"nebula: {sentence}")


def _with_metrics(notes: _Notes) -> _Notes:
    """The members' notes, if each has metrics; ``PeerLost`` otherwise, which all see alike."""
    for member, note in notes.items():
        try:
            note["metrics"] = {name: float(value) for name, value in note["metrics"].items()}
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise PeerLost(member, f"its metrics must be numbers by name, got {note!r:.80}") from error
    return notes
