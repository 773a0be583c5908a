"""A run's part that needs no others: what becomes of what links and doors have to say."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

import paddlenlp_nebula.run as run_module
from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.errors import PeerLost
from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.link.door import Event
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.run import Run

from .link.clusters import at_once, meet


def run(**settings: Any) -> Run:
    return Run(NebulaArguments(cluster="west", clusters="west", rendezvous="loopback", **settings), Ledger())


def test_what_links_and_door_have_to_say_is_in_the_report() -> None:
    mine = run()
    channel = SimpleNamespace(notes=deque(["it expires", "it expires"]), bytes_delivered=0, seconds_sending=0.0)
    link: Any = SimpleNamespace(
        bytes_sent=Counter(), bytes_received=Counter(), channels={"east": channel}, refusals={"nonsense": 3}
    )
    mine._link = link
    mine._count_bytes()
    report = mine.ledger.report()
    assert report["degradations"] == ["it expires"]
    assert report["refused_connections"] == {"nonsense": 3}


def test_a_stranger_at_the_door_is_logged_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_module.logger, "warning", said.append)
    mine = run()
    body = {"reason": "it must speak TLS", "address": "192.0.2.1", "count": 10}
    mine._on_event(Event(Kind.REFUSED, "", body))
    assert said == ["nebula: refused at the door, 192.0.2.1 (no. 10 of its sort): it must speak TLS"]
    assert mine.ledger.degradations == []


@pytest.mark.parametrize("metrics", [None, 7, [0.5], {"loss": None}, {"loss": "much"}, {"loss": 10**400}])
def test_a_member_whose_metrics_are_none_is_lost_and_the_others_go_on(metrics: Any) -> None:
    links = meet("amber", "birch", "cedar")
    west, east, bad = ("amber", "birch", "cedar")

    def honest(name: str, loss: float) -> tuple[dict[str, float], tuple[str, ...]]:
        mine = run()
        mine._link = links[name]
        mine._party = Party(links[name], on_loss="continue", quorum=1, report=mine.degrade)
        mine._prepared = True
        agreed = mine.agree_on_metrics({"loss": loss})
        assert any("its metrics must be numbers by name" in sentence for sentence in mine.ledger.degradations)
        return agreed, links[name].members

    def hostile() -> None:
        links[bad].post(Kind.NOTE, pack_note({} if metrics is None else {"metrics": metrics}), round=1)
        with contextlib.suppress(PeerLost):
            while links[bad]._await(west):
                links[bad]._consume(west)
        links[bad].close()

    found = at_once({west: lambda: honest(west, 1.0), east: lambda: honest(east, 2.0), bad: hostile}, timeout_s=60)
    assert found[west] == found[east] == ({"loss": 1.5}, (west, east))
