"""Who is in the run: agreeing on a new member list after a loss.

Members notice a loss at different moments and may even disagree on whom they lost. Each proposes
the members it can still reach; a member that others cannot reach is left out, the one earlier in
the configured order being kept. It is settled when every remaining member proposes the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paddlenlp_nebula.errors import NebulaError, PeerLost, ProtocolError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.link import EpochProposed, Link
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.link.returns import Returns

__all__ = ["Party", "agree_on_members", "compatible"]

T = TypeVar("T")


class Party:
    """The members, doing numbered exchanges together, whatever happens to some of them.

    Args:
        link: the link to the peers.
        on_loss: ``continue`` with the remaining members, or ``stop`` (raise).
        quorum: members, this one included, below which going on makes no sense.
        report: told, in a sentence, of each loss.
        on_change: told of each loss and end for the report: what it is, the cluster, the reason.
        number: the last exchange that has been completed (from a checkpoint), else 0.

    Attributes:
        number: the last completed exchange.
        ended: why another member has ended training for everybody, or None.
        returns: watches for clusters that come back; None where they cannot.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_loss: str,
        quorum: int,
        report: Callable[[str], None],
        on_change: Callable[[str, str, str], None] = lambda what, cluster, reason: None,
        number: int = 0,
    ) -> None:
        self.link = link
        self.number = number
        self.ended: str | None = None
        self.returns: Returns | None = None
        self._on_loss = on_loss
        self._quorum = quorum
        self._report = report
        self._on_change = on_change

    def together(self, attempt: Callable[[int], T]) -> T:
        """Carry out one exchange; after a loss settle who is left and carry it out again.

        Args:
            attempt: does the exchange of the given number over the link and returns its result,
                without any lasting effect: it may be called again.

        Raises:
            PeerLost: a member was lost and ``on_loss`` is ``stop``.
            NebulaError: too few members are left.
        """
        number = self.number + 1
        while True:
            complete = False
            try:
                result = attempt(number)
                complete = True
                self._vote(number)
                self.link.flush()  # nobody may wait for our last word while we compute
                break
            except EpochProposed:
                pass
            except PeerLost as loss:
                for each in (loss, *loss.also):
                    self._lose(each)
            committed = agree_on_members(self.link, self.number, self._lose)
            if complete and (committed >= number or not self.link.peers):
                break
        self.number = number
        return result

    def candidates(self) -> tuple[str, ...]:
        """Clusters that have come back, as far as this one can see."""
        return () if self.returns is None else self.returns.candidates(self.number)

    def end(self, sentence: str) -> None:
        """A member has ended training for everybody."""
        self.ended = self.ended or sentence
        self._report(sentence)

    def _vote(self, number: int) -> None:
        """With three members and more: nobody applies a result before everybody is known to have it."""
        if len(self.link.members) >= 3:
            self.link.post(Kind.VOTE, round=number)
            for peer in self.link.peers:
                with self.link.receive(peer, Kind.VOTE, round=number):
                    pass

    def _lose(self, loss: PeerLost) -> None:
        if loss.peer == self.link.cluster:  # the others see the same in what it has sent, and go on without it
            if not self.link.peers:
                raise loss  # alone it would find the same again and again
            for peer in self.link.peers:
                self._lose(PeerLost(peer, f"it cannot go on with what this cluster has sent: {loss.reason}"))
            return
        if loss.peer not in self.link.members:
            return
        self.link.drop(loss)
        if loss.deliberate:
            self._on_change("ended", loss.peer, loss.reason)
            self.end(f"cluster {loss.peer!r} ended training: {loss.reason}")
            return
        self._on_change("lost", loss.peer, loss.reason)
        left = ", ".join(self.link.members)
        self._report(f"cluster {loss.peer!r} was lost after exchange {self.number}: {loss.reason}; members now: {left}")
        if self._on_loss == "stop":
            raise loss
        if len(self.link.members) < self._quorum:
            raise NebulaError(
                f"{self._quorum} clusters are needed to go on (sync_quorum) but only {len(self.link.members)} of them "
                f"({left}) can: {loss}"
            ) from loss


def compatible(order: Sequence[str], reach: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The members that can all reach each other, earlier ones first.

    Args:
        order: candidates, in the configured order.
        reach: for each candidate heard from, the members it can reach; others are taken on trust.
    """
    kept: list[str] = []
    for candidate in order:
        accepted = all(candidate in reach.get(member, order) for member in kept)
        accepts = all(member in reach.get(candidate, order) for member in kept)
        if accepted and accepts:
            kept.append(candidate)
    return tuple(kept)


def agree_on_members(link: Link, committed: int, lose: Callable[[PeerLost], None]) -> int:
    """Settle the next epoch's member list with the remaining peers.

    Args:
        link: its members are the proposal to start from, and the agreed list afterwards.
        committed: the last exchange whose result this cluster has applied.
        lose: takes a lost peer out of the members.

    Returns:
        The last exchange that any member has applied. A member applies one only after everybody
        voted to have everything of it, so whoever finds itself behind can apply its own result.
    """
    heard: dict[str, _Proposal] = {}
    latest = committed
    proposal = link.members
    _propose(link, latest)
    while unsettled := [peer for peer in link.peers if peer not in heard or heard[peer].members != proposal]:
        peer = unsettled[0]
        try:
            with link.receive_epoch(peer) as (epoch, note):
                heard[peer] = theirs = _Proposal.parse(note, epoch, peer, link, committed)
        except PeerLost as loss:
            lose(loss)
        else:
            latest = max(latest, theirs.committed)
            if link.cluster not in theirs.members:
                lose(PeerLost(peer, "it goes on without this cluster"))
        reach = {name: theirs.members for name, theirs in heard.items() if name in link.members}
        wanted = compatible(link.members, {**reach, link.cluster: link.members})
        for name in link.members:
            if name not in wanted:
                lose(_second_hand(name, heard))
        if link.members != proposal:
            proposal = link.members
            _propose(link, latest)
    # The proposals that settle it are the same for everybody, and so is what is concluded from them.
    link.epoch = 1 + max([link.epoch, *(heard[peer].epoch for peer in link.peers)])
    return latest


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What a peer proposes: the members it can reach, its epoch, the last exchange applied, and whom it has lost."""

    members: tuple[str, ...]
    epoch: int
    committed: int
    lost: dict[str, PeerLost]

    @classmethod
    def parse(cls, note: Mapping[str, Any], epoch: int, peer: str, link: Link, committed: int) -> _Proposal:
        members, theirs = note.get("members"), note.get("committed")
        if not isinstance(members, list) or any(name not in link.clusters for name in members) or peer not in members:
            raise ProtocolError(
                f"the members that cluster {peer!r} proposes must be clusters of this run, got {members}"
            )
        if not isinstance(theirs, int) or abs(theirs - committed) > 1:
            raise ProtocolError(
                f"cluster {peer!r} cannot have completed exchange {theirs!r} when this one has {committed}"
            )
        if epoch > link.epoch + len(link.clusters):
            raise ProtocolError(f"cluster {peer!r} cannot be in epoch {epoch} when this one is in {link.epoch}")
        try:
            lost = {str(name): PeerLost(name, str(why), deliberate=bool(done)) for name, why, done in note["lost"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"cluster {peer!r} must say whom it has lost, got {note.get('lost')!r:.80}") from error
        return cls(tuple(members), epoch, theirs, lost)


def _propose(link: Link, committed: int) -> None:
    lost = [(loss.peer, loss.reason[:500], loss.deliberate) for loss in link.losses().values()]
    link.post(Kind.EPOCH, pack_note({"members": link.members, "committed": committed, "lost": lost}))


def _second_hand(name: str, heard: Mapping[str, _Proposal]) -> PeerLost:
    """The loss of a member that this cluster could still reach, in the words of whoever cannot."""
    for peer, theirs in heard.items():
        if name in theirs.lost:
            loss = theirs.lost[name]
            return PeerLost(name, f"{loss.reason} (says cluster {peer!r})", deliberate=loss.deliberate)
    return PeerLost(name, "it cannot reach all others")
