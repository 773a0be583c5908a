"""All-gathers: every member gives something of one kind, and gets what all the others give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paddlenlp_nebula.link.frames import NOTE_BYTES, Kind
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.notes import pack_note, parse_note

__all__ = ["all_gather", "all_gather_notes", "pass_on"]


def all_gather(
    link: Link,
    kind: Kind,
    round: int,
    parts: int,
    produce: Callable[[int], memoryview],
    when_posted: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, str, memoryview]]:
    """Exchange ``parts`` messages with every member, pipelined.

    Args:
        link: the link to the peers.
        kind: kind of the messages.
        round: exchange number.
        parts: how many messages each member sends.
        produce: called with 0, 1, ... as soon as there is room for the part, well before it is
            yielded; the buffer it returns must stay as it is until that part has been yielded.
        when_posted: called once, when the last part has been posted: what follows it need not wait
            for the others' parts.

    Yields:
        (part, member, payload) for each part in turn, and within it for each member in order,
        this cluster included. The payload is valid until the next iteration.
    """
    return _exchange(link, kind, round, range(parts), produce, None, link.members, when_posted)


def pass_on(
    link: Link,
    kind: Kind,
    round: int,
    parts: Sequence[int],
    produce: Callable[[int], memoryview],
    routes: Mapping[str, Sequence[str]],
) -> Iterator[tuple[int, str, memoryview]]:
    """Send ``parts`` messages from some members to some others, pipelined.

    Args:
        link, kind, round: as for `all_gather`.
        parts: numbers of the messages, the same on all members.
        produce: as for `all_gather`, on a member that sends.
        routes: member that sends -> members that it sends to, the same on all members.

    Yields:
        (part, member, payload) for each part in turn, and within it for each member that sends it to this one.
    """
    to = routes.get(link.cluster, ())
    givers = [member for member in link.members if link.cluster in routes.get(member, ())]
    yield from _exchange(link, kind, round, parts, produce, to, givers)
    link.flush()


def _exchange(
    link: Link,
    kind: Kind,
    round: int,
    parts: Sequence[int],
    produce: Callable[[int], memoryview],
    to: Sequence[str] | None,
    givers: Sequence[str],
    when_posted: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, str, memoryview]]:
    """Post ``parts`` to some peers (None: to all), and yield those of the givers, this cluster among them perhaps."""
    own: dict[int, memoryview] = {}
    posted = 0
    sends = to is None or bool(to)
    unheard = all(giver == link.cluster for giver in givers)  # nobody's messages slow us down
    told = False

    def fill() -> None:
        nonlocal posted, told
        while sends and posted < len(parts) and (not own or link.room_for(len(own[posted - 1]), to)):
            own[posted] = produce(parts[posted])
            link.post(kind, own[posted], round=round, part=parts[posted], to=to)
            posted += 1
        if posted == len(parts) and not told:
            told = True
            when_posted()

    fill()
    for index, part in enumerate(parts):
        fill()
        for giver in givers:
            if giver == link.cluster:
                yield part, giver, own[index]
            else:
                with link.receive(giver, kind, round=round, part=part, while_waiting=fill) as message:
                    yield part, giver, message.payload
        if sends and unheard:
            link.flush()
        own.pop(index, None)


def all_gather_notes(
    link: Link, note: Mapping[str, Any], *, round: int = 0, kind: Kind = Kind.NOTE
) -> dict[str, dict[str, Any]]:
    """Exchange one small JSON object with every member; returns member -> object, in order."""
    payload = pack_note(note)
    if len(payload) > NOTE_BYTES:
        raise ValueError(f"a note must be at most {NOTE_BYTES} bytes of JSON, got {len(payload)}")
    link.post(kind, payload, round=round)
    notes = {}
    for member in link.members:
        sender = f"cluster {member!r}"
        if member == link.cluster:
            notes[member] = parse_note(payload, kind.name, sender)
        else:
            with link.receive(member, kind, round=round) as message:
                notes[member] = parse_note(message.payload, kind.name, sender)
    return notes
