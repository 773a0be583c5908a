"""What passes through doors, without sockets: arrivals, relaying, goodbyes, and who makes way for whom."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION, Kind
from paddlenlp_nebula.link.line import Line
from paddlenlp_nebula.link.pulse import Pulse
from paddlenlp_nebula.link.switchboard import Event, Switchboard

CLUSTERS = ("amber", "birch", "cedar", "delta")
OPEN = {"takes_back": True, "max_steps": 9}


class FakeLine(Line):
    """A line without a connection that keeps what is sent."""

    def __init__(self, cluster: str | None = None, *, leads_up: bool = False, names: Any = None) -> None:
        session: Any = None if names is None else SimpleNamespace(names=frozenset(names), peer="a stranger")
        nothing: Any = None
        super().__init__(nothing, cluster, session, "1.2.3.4", leads_up=leads_up)
        self.sent: list[tuple[Kind, dict[str, Any]]] = []

    def send(self, kind: Kind, body: Mapping[str, Any]) -> None:
        self.sent.append((kind, dict(body)))

    def of(self, kind: Kind) -> list[dict[str, Any]]:
        """Bodies of the messages of a kind; they are taken."""
        found = [body for sent, body in self.sent if sent is kind]
        self.sent = [message for message in self.sent if message[0] is not kind]
        return found


class Board(Switchboard):
    def __init__(self, cluster: str, timeout_s: float = 60.0) -> None:
        self.log: list[Event] = []
        super().__init__(cluster, CLUSTERS, timeout_s, self.log.append)

    def knocked(self, name: Any, line: FakeLine | None = None, **more: Any) -> FakeLine:
        """Somebody comes to this door."""
        line = line or FakeLine()
        self.lines.append(line)
        body = {"cluster": name, "clusters": list(CLUSTERS), "protocol": PROTOCOL_VERSION, "run": None, **more}
        self.message(line, Kind.KNOCK, body)
        return line

    def led_up(self, name: str, *arrived: str, run: Any = None) -> FakeLine:
        """An earlier cluster's door opens."""
        line = FakeLine(name, leads_up=True)
        self.adopt(line, {"arrived": list(arrived or (name, self.cluster)), "run": run})
        return line

    def says(self, line: FakeLine, kind: Kind, **body: Any) -> None:
        self.message(line, kind, body)

    def loses(self, line: FakeLine, reason: str = "it broke") -> None:
        self.drop(line, reason)

    def news(self) -> list[Event]:
        """What has been reported, taken."""
        found = list(self.events)
        self.events.clear()
        return found


# Arriving


def test_everybody_at_the_door_is_told_who_has_come() -> None:
    board = Board("amber")
    birch = board.knocked("birch")
    assert birch.of(Kind.WELCOME) == [{"arrived": ["amber", "birch"], "run": None}]
    cedar = board.knocked("cedar")
    expected = [{"arrived": ["amber", "birch", "cedar"], "run": None}]
    assert birch.of(Kind.WELCOME) == cedar.of(Kind.WELCOME) == expected
    assert board.arrived() == {"amber", "birch", "cedar"}
    assert board.direct() == {"birch", "cedar"}
    assert board.news() == []
    assert board.log == []


def test_who_can_be_spoken_to_through_another_door() -> None:
    board = Board("cedar")
    up = board.led_up("amber", "amber", "birch", "cedar")
    assert board.arrived() == {"amber", "birch", "cedar"}
    assert board.direct() == {"amber"}
    board.says(up, Kind.WELCOME, arrived=["amber", "birch", "cedar", "delta"], run=None)
    assert board.arrived() == set(CLUSTERS)
    board.says(up, Kind.GONE, **{"from": "birch", "to": "cedar", "reason": "it broke"})
    assert board.arrived() == {"amber", "cedar", "delta"}
    board.loses(up)
    assert board.arrived() == {"cedar"}


def test_a_run_that_has_begun_is_made_known_both_ways() -> None:
    begun = Board("amber")
    begun.facts = OPEN
    assert begun.knocked("birch").of(Kind.WELCOME) == [{"arrived": ["amber", "birch"], "run": OPEN}]

    waiting = Board("cedar")
    up = waiting.led_up("birch", run=OPEN)
    assert waiting.theirs == OPEN
    waiting.says(up, Kind.WELCOME, arrived=["birch", "cedar"], run=None)
    assert waiting.theirs == OPEN  # which nobody takes back

    restarted = Board("amber")
    restarted.knocked("birch", run=OPEN)
    assert restarted.theirs == OPEN


@pytest.mark.parametrize("run", [True, {}, [1], "x"])
def test_facts_that_are_none(run: Any) -> None:
    board = Board("amber")
    with pytest.raises(ProtocolError, match="takes_back"):
        board.knocked("birch", run=run)
    assert board.arrived() == {"amber"}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.KNOCK])
def test_a_stranger_must_knock(kind: Kind) -> None:
    board, line = Board("amber"), FakeLine()
    with pytest.raises(ProtocolError, match=f"a stranger at the door must KNOCK first, got {kind.name}"):
        board.says(line, kind, **{"from": "birch", "to": "cedar"})


def test_a_stranger_is_refused_counted_and_no_event_of_the_run() -> None:
    board = Board("amber")
    lines = [board.knocked("zebra") for _ in range(12)]
    for line in lines:
        assert line.refused
        assert "'zebra' cannot knock" in line.of(Kind.REFUSED)[0]["reason"]
    assert board.news() == []
    assert [event.body["count"] for event in board.log] == [1, 10]
    assert dict(board.refusals.counts) == {"a knock": 12}
    assert board.arrived() == {"amber"}
    for line in lines:
        board.loses(line)
    assert board.lines == []


def test_clusters_that_do_not_fit_together_concern_the_run_until_it_has_begun() -> None:
    board = Board("amber")
    board.knocked("birch", protocol=0)
    ((kind, cluster, _),) = [(event.kind, event.cluster, event.body) for event in board.news()]
    assert (kind, cluster) == (Kind.REFUSED, "birch")
    board.facts = OPEN
    board.knocked("birch", protocol=0)
    assert board.news() == []


@pytest.mark.parametrize("name", ["cedar", ["birch"], {"birch": 1}, None, 7])
def test_a_certificate_for_another_name(name: Any) -> None:
    board = Board("amber")
    line = board.knocked(name, FakeLine(names=["birch"]))
    assert line.refused
    assert "must show a certificate for that cluster, got one for birch" in line.of(Kind.REFUSED)[0]["reason"]
    assert dict(board.refusals.counts) == {"a certificate for another name": 1}
    assert board.arrived() == {"amber"}
    good = board.knocked("birch", FakeLine(names=["birch"]))
    assert good.session is not None
    assert good.session.peer == "cluster 'birch'"


# Coming back


def test_a_second_one_is_refused_as_long_as_the_first_is_heard() -> None:
    board = Board("amber")
    first = board.knocked("birch")
    board.facts = OPEN
    second = board.knocked("birch")
    assert second.refused
    assert "already in the run" in second.of(Kind.REFUSED)[0]["reason"]
    assert board.lines[0] is first
    assert board.news() == []


@pytest.mark.parametrize(("silent_s", "makes_way"), [(1.9, False), (2.1, True)])
def test_a_stale_line_makes_way_once_the_run_has_begun(silent_s: float, makes_way: bool) -> None:
    board = Board("amber")
    now = [0.0]
    stale, witness = board.knocked("birch"), board.knocked("cedar")
    stale.pulse = Pulse(60.0, lambda: now[0])
    now[0] = silent_s
    board.facts = OPEN
    anew = board.knocked("birch")
    assert anew.refused is not makes_way
    assert (stale in board.lines) is not makes_way
    told = [(event.kind, event.cluster, event.body["reason"]) for event in board.news()]
    gone = witness.of(Kind.GONE)
    if makes_way:
        assert told == [(Kind.GONE, "birch", "it has come to the door anew")]
        assert [(body["from"], body["to"]) for body in gone] == [("birch", "cedar")]
        assert witness.of(Kind.WELCOME)[-1]["arrived"] == ["amber", "birch", "cedar"]
    else:
        assert told == []
        assert gone == []


def test_while_the_clusters_are_meeting_no_line_makes_way() -> None:
    board = Board("amber")
    stale = board.knocked("birch")
    stale.pulse = Pulse(60.0, iter([0.0, 1000.0, 2000.0]).__next__)
    assert board.knocked("birch").refused


def test_who_comes_back_is_news_again_when_it_goes() -> None:
    board = Board("amber")
    line = board.knocked("birch")
    board.facts = OPEN
    board.says(line, Kind.LEAVE, to="amber", reason="it failed")
    board.loses(line)
    assert [event.kind for event in board.news()] == [Kind.LEAVE]
    line = board.knocked("birch")
    board.loses(line, "it broke again")
    assert [(event.kind, event.body["reason"]) for event in board.news()] == [(Kind.GONE, "it broke again")]


def test_who_is_dropped_and_stays_is_news_when_it_goes() -> None:
    """It was told that the other goes on without it: neither has ended."""
    board = Board("amber")
    line = board.knocked("birch")
    witness = board.knocked("cedar")
    board.says(line, Kind.LEAVE, to="amber", reason="it goes on without this cluster", stays=True)
    board.says(line, Kind.LEAVE, to="cedar", reason="it goes on without this cluster", stays=True)
    board.loses(line)
    assert [event.kind for event in board.news()] == [Kind.LEAVE, Kind.GONE]
    assert [body["from"] for body in witness.of(Kind.GONE)] == ["birch"]


def test_a_port_of_an_earlier_life_is_not_used() -> None:
    board = Board("cedar")
    board.facts = OPEN
    up = board.led_up("amber")
    board.says(up, Kind.PORT, **{"from": "amber", "to": "cedar", "port": "old"})
    assert board.ports == {"amber": "old"}
    board.loses(up)
    board.led_up("amber")
    assert board.ports == {}


def test_a_port_that_was_relayed_is_kept_when_a_line_of_its_own_follows() -> None:
    board = Board("cedar")
    amber = board.led_up("amber", "amber", "birch", "cedar", run=OPEN)
    board.facts = OPEN
    board.says(amber, Kind.PORT, **{"from": "birch", "to": "cedar", "port": "new"})
    board.led_up("birch", run=OPEN)
    assert board.ports == {"birch": "new"}


def test_a_port_goes_with_its_cluster_that_another_door_has_relayed() -> None:
    board = Board("cedar")
    amber = board.led_up("amber", "amber", "birch", "cedar", run=OPEN)
    board.facts = OPEN
    for kind, more in ((Kind.GONE, {"reason": "it died"}), (Kind.LEAVE, {"reason": "it failed", "deliberate": False})):
        board.says(amber, Kind.PORT, **{"from": "birch", "to": "cedar", "port": "old"})
        board.says(amber, kind, **{"from": "birch", "to": "cedar", **more})
        assert board.ports == {}


def test_who_has_completed_its_training_must_come_again_later() -> None:
    board = Board("amber")
    line = board.knocked("birch")
    board.says(line, Kind.LEAVE, to="amber", reason="its training is complete", deliberate=True)
    board.loses(line)
    with pytest.raises(EOFError):
        board.knocked("birch")
    board.knocked("cedar")
    board.closing = True
    with pytest.raises(EOFError):
        board.knocked("delta")


# Relaying


@pytest.mark.parametrize("kind", [Kind.PORT, Kind.LEAVE])
def test_the_door_relays(kind: Kind) -> None:
    board = Board("amber")
    birch, cedar = board.knocked("birch"), board.knocked("cedar")
    board.says(birch, kind, to="cedar", port="p", reason="r")
    assert cedar.of(kind) == [{"from": "birch", "to": "cedar", "port": "p", "reason": "r"}]
    assert birch.of(kind) == []
    assert board.news() == []


def test_nobody_speaks_for_another() -> None:
    board = Board("amber")
    birch, cedar = board.knocked("birch"), board.knocked("cedar")
    board.says(birch, Kind.LEAVE, **{"from": "delta", "to": "cedar", "reason": "r"})
    assert cedar.of(Kind.LEAVE)[0]["from"] == "birch"
    for kind in (Kind.GONE, Kind.WELCOME):
        with pytest.raises(ProtocolError, match=f"cluster 'birch' sent a {kind.name} message to the door"):
            board.says(birch, kind, **{"from": "cedar", "to": "amber", "arrived": ["delta"]})


def test_what_came_from_above_is_not_sent_up_again() -> None:
    board = Board("cedar")
    one, two = board.led_up("amber"), board.led_up("birch")
    below = board.knocked("delta")
    board.says(one, Kind.LEAVE, **{"from": "amber", "to": "birch", "reason": "r"})
    board.says(one, Kind.LEAVE, **{"from": "amber", "to": "delta", "reason": "r"})
    assert two.sent == []
    assert below.of(Kind.LEAVE) == []  # amber's own door reaches whoever has a line to it


def test_the_earliest_door_relays() -> None:
    board = Board("delta")
    birch, amber = board.led_up("birch"), board.led_up("amber")
    board.send(Kind.LEAVE, {"from": "delta", "to": "birch"})
    board.send(Kind.LEAVE, {"from": "delta", "to": "cedar"})
    assert [body["to"] for body in birch.of(Kind.LEAVE)] == ["birch"]
    assert [body["to"] for body in amber.of(Kind.LEAVE)] == ["cedar"]
    board.loses(amber)
    board.send(Kind.LEAVE, {"from": "delta", "to": "cedar"})
    assert [body["to"] for body in birch.of(Kind.LEAVE)] == ["cedar"]
    board.loses(birch)
    board.send(Kind.LEAVE, {"from": "delta", "to": "cedar"})  # nobody is there; nothing happens


def test_ports_are_events_while_meeting_and_kept_afterwards() -> None:
    board = Board("birch")
    up = board.led_up("amber")
    board.says(up, Kind.PORT, **{"from": "amber", "to": "birch", "port": "first"})
    assert [(event.kind, event.body["port"]) for event in board.news()] == [(Kind.PORT, "first")]
    board.facts = OPEN
    board.says(up, Kind.PORT, **{"from": "amber", "to": "birch", "port": "second"})
    assert board.news() == []
    assert board.ports == {"amber": "second"}


# Going


def test_a_death_is_told_to_those_who_have_it_through_us() -> None:
    board = Board("birch")
    up, cedar, delta = board.led_up("amber"), board.knocked("cedar"), board.knocked("delta")
    board.loses(cedar)
    assert [(event.kind, event.cluster) for event in board.news()] == [(Kind.GONE, "cedar")]
    assert delta.of(Kind.GONE) == [{"from": "cedar", "to": "delta", "reason": "it broke"}]
    assert up.of(Kind.GONE) == []
    board.loses(up)
    assert [(event.kind, event.cluster) for event in board.news()] == [(Kind.GONE, "amber")]
    assert delta.of(Kind.GONE) == []
    board.loses(up)
    assert board.news() == []


def test_after_a_goodbye_a_closed_connection_is_no_news_to_whom_it_was_said() -> None:
    board = Board("amber")
    birch, cedar, delta = board.knocked("birch"), board.knocked("cedar"), board.knocked("delta")
    board.says(birch, Kind.LEAVE, to="cedar", reason="r")
    board.loses(birch)
    assert [event.kind for event in board.news()] == [Kind.GONE]
    assert cedar.of(Kind.GONE) == []
    assert len(delta.of(Kind.GONE)) == 1


def test_a_door_that_sees_a_cluster_itself_believes_no_other() -> None:
    board = Board("cedar")
    up = board.led_up("amber", "amber", "birch", "cedar")
    birch = board.led_up("birch")
    board.says(up, Kind.GONE, **{"from": "birch", "to": "cedar", "reason": "r"})
    assert board.news() == []
    assert board.arrived() == {"amber", "birch", "cedar"}
    board.loses(birch)
    assert [event.cluster for event in board.news()] == ["birch"]


def test_a_door_that_closes_reports_nothing_any_more() -> None:
    board = Board("amber")
    birch = board.knocked("birch")
    board.closing = True
    board.loses(birch)
    assert board.news() == []


@pytest.mark.parametrize("to", [None, "zebra", ["amber"], 7, {}])
@pytest.mark.parametrize("kind", [Kind.PORT, Kind.LEAVE])
def test_messages_to_nobody(kind: Kind, to: Any) -> None:
    board = Board("amber")
    birch = board.knocked("birch")
    with pytest.raises(ProtocolError, match="must be from one cluster to another"):
        board.says(birch, kind, to=to)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(CLUSTERS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("takes_back", "x")), inner, max_size=2)
    ),
    max_leaves=5,
)
fields = ("cluster", "clusters", "protocol", "run", "from", "to", "reason", "arrived", "port", "stays", "deliberate")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(list(Kind)),
            st.dictionaries(st.sampled_from(fields), anything),
            st.booleans(),
        ),
        max_size=25,
    ),
    st.booleans(),
)
def test_whatever_is_said_it_is_dealt_with_or_refused(
    messages: list[tuple[int, Kind, dict[str, Any], bool]], begun: bool
) -> None:
    board = Board("birch")
    lines = [board.led_up("amber"), board.knocked("cedar"), board.knocked("delta", FakeLine(names=["delta"]))]
    for line in (FakeLine(), FakeLine(names=["delta"]), FakeLine(names=[])):
        board.lines.append(line)
        lines.append(line)
    board.facts = OPEN if begun else None
    for index, kind, body, whole in messages:
        if whole:  # nearly right
            good = {"cluster": "delta", "clusters": list(CLUSTERS), "protocol": PROTOCOL_VERSION, "from": "amber"}
            body = {**good, "to": "birch", "arrived": ["amber"], **body}
        if lines[index] not in board.lines or lines[index].refused:
            continue
        try:
            board.says(lines[index], kind, **body)
        except (ProtocolError, EOFError):
            board.loses(lines[index])
        known = [line.cluster for line in board.lines if line.cluster is not None]
        assert len(known) == len(set(known))
        assert board.arrived() <= set(CLUSTERS)
        assert {event.cluster for event in board.events} <= set(CLUSTERS)


def test_who_has_said_goodbye_through_another_door_has_not_arrived() -> None:
    """That door says no more when it goes; else a courier would wait for it, busily, again and again."""
    amber, birch = Board("amber"), Board("birch")
    up, line, cedar = birch.led_up("amber"), amber.knocked("birch"), amber.knocked("cedar")
    birch.says(up, Kind.WELCOME, **line.of(Kind.WELCOME)[-1])
    for stays, still in ((True, {"cedar"}), (False, set())):
        amber.says(cedar, Kind.LEAVE, to="birch", reason="it failed", deliberate=False, stays=stays)
        birch.says(up, Kind.LEAVE, **line.of(Kind.LEAVE)[0])
        assert birch.arrived() == {"amber", "birch"} | still
    amber.loses(cedar)
    assert line.of(Kind.GONE) == []
