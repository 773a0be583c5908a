"""The processes of one cluster, seen from its leader."""

from __future__ import annotations

import time

import pytest

from paddlenlp_nebula import local
from paddlenlp_nebula.local import LocalGroup


def test_the_leaders_own_error_survives_local_peers_that_are_gone() -> None:
    group = LocalGroup()
    group.size = 2

    def broken(status: int, payload: bytes = b"") -> None:
        raise RuntimeError("gloo: connection closed by peer")

    group._announce = broken  # type: ignore[method-assign]

    def work() -> None:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        group.lead(work)


def test_the_wait_is_announced_only_to_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that fails between two exchanges says goodbye while its local peers are in a collective of their own."""
    monkeypatch.setattr(local, "_ANNOUNCE_S", 0.01)
    group = LocalGroup()
    group.size = 2
    told: list[int] = []
    group._announce = lambda status, payload=b"": told.append(status)  # type: ignore[method-assign]

    def work() -> None:
        time.sleep(0.02)
        group.tick()

    group.lead(work)
    assert told == [local._WAITING, local._DONE]
    time.sleep(0.02)
    group.tick()
    with pytest.raises(ZeroDivisionError):
        group.lead(lambda: 1 / 0)
    time.sleep(0.02)
    group.tick()
    assert told == [local._WAITING, local._DONE, local._FAILED]
