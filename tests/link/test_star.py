"""A star's ends: who is linked with whom, who is refused, and a hub that waits for nobody."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from paddlenlp_nebula.errors import HandshakeError, NebulaError, PeerLost
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.star import Star, open_star
from paddlenlp_nebula.transport import courier

from .clusters import at_once
from .test_door import until
from .test_rendezvous import Courier
from .test_returns import Mortal

pytestmark = pytest.mark.timeout(60)
ROSTER = ("amber", "birch", "cedar")


@pytest.fixture(name="where")
def _where(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(courier, "CourierChannel", Mortal)
    monkeypatch.setattr(Courier, "broken", set())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def opened(cluster: str, where: str, roster: Sequence[str] = ROSTER, timeout_s: float = 10.0) -> Star:
    return open_star(cluster, roster, where, timeout_s=timeout_s, report=print)


def heard(star: Star, peer: str) -> bytes | None:
    with star.link.next_message(peer) as message:
        return None if message is None else bytes(message.payload)


def come(star: Star, *names: str) -> None:
    found: list[str] = []
    until(lambda: (found.extend(star.look()), set(found) == set(names))[1], 20)


def test_leaves_come_one_by_one_and_are_linked_with_the_hub_alone(where: str) -> None:
    hub = opened("amber", where)
    assert hub.others == ("birch", "cedar")
    assert hub.link.peers == ()
    birch = opened("birch", where)
    come(hub, "birch")
    cedar = opened("cedar", where)
    come(hub, "cedar")
    for leaf in (birch, cedar):
        come(leaf, "amber")
        assert leaf.link.peers == leaf.others == ("amber",)
        leaf.link.post(Kind.QUESTION, leaf.link.cluster.encode(), to=["amber"])
    for name in ("birch", "cedar"):
        until(lambda name=name: heard(hub, name) == name.encode(), 10)
    birch.leave("done", deliberate=True)
    until(lambda: "birch" in hub.link.departures(), 10)
    hub.lose(hub.link.departures()["birch"])
    assert (hub.ended, hub.link.peers) == ({"birch"}, ("cedar",))
    for end in (cedar, hub):
        end.close()
    assert not Courier.open


def test_a_leaf_that_is_lost_can_come_back(where: str) -> None:
    hub, birch = opened("amber", where), opened("birch", where)
    come(hub, "birch")
    birch.close()
    with pytest.raises(PeerLost) as caught:
        until(lambda: heard(hub, "birch"), 10)
    hub.lose(caught.value)
    assert (hub.ended, hub.link.peers) == (set(), ())
    birch = opened("birch", where)
    come(hub, "birch")
    come(birch, "amber")
    birch.close()
    hub.close()


def test_a_hub_that_is_not_there_is_looked_for_in_vain(where: str) -> None:
    with pytest.raises(NebulaError, match=r"looked for cluster 'amber' at .* for 0.5 s and did not find it"):
        opened("birch", where, timeout_s=0.5)


def test_other_rosters_are_refused_with_both(where: str) -> None:
    hub = opened("amber", where)
    with pytest.raises(HandshakeError, match=r"has clusters=\['amber', 'birch', 'cedar'\] but cluster 'birch' has"):
        opened("birch", where, ["amber", "birch"])
    hub.close()


def test_loopback_stars_meet_by_name() -> None:
    ends = at_once({name: lambda name=name: opened(name, "loopback") for name in ROSTER})
    assert {name: end.link.peers for name, end in ends.items()} == {
        "amber": ("birch", "cedar"),
        "birch": ("amber",),
        "cedar": ("amber",),
    }
    assert not ends["birch"].returns
    for end in ends.values():
        end.close()
