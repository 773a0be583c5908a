"""Joining with who comes back: attempts that fail are repeated, less and less often, and never end the thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from paddlenlp_nebula.errors import ChannelLost
from paddlenlp_nebula.link import connector
from paddlenlp_nebula.link.connector import Connector
from paddlenlp_nebula.transport import courier

from .test_door import until

pytestmark = pytest.mark.timeout(30)


SAID: list[str] = []


class FakeDoor:
    cluster, clusters = "amber", ("amber", "birch")

    def __init__(self) -> None:
        self.there = {"amber", "birch"}

    def arrived(self) -> set[str]:
        return self.there

    def port(self, peer: str) -> str | None:
        return None


class FakeCourier:
    """Fails, at once or later, as often as ``faults`` says; then it has met its counterpart."""

    faults: ClassVar[list[BaseException | None]] = []
    begun: ClassVar[list[float]] = []
    port = None

    def __init__(self, peer: str, *, credentials: Any = None) -> None:
        self.begun.append(time.monotonic())
        self.fault = self.faults.pop(0) if self.faults else None
        self.connected = self.fault is None
        if isinstance(self.fault, OSError):
            raise self.fault

    def open_port(self) -> None:
        pass

    def progress(self) -> None:
        if self.fault is not None:
            raise self.fault

    def close(self) -> None:
        pass


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> FakeDoor:
    monkeypatch.setattr(courier, "CourierChannel", FakeCourier)
    monkeypatch.setattr(FakeCourier, "begun", [])
    monkeypatch.setattr(connector, "_RETRY_S", 0.05)
    monkeypatch.setattr(connector, "_IDLE_S", 0.01)
    return FakeDoor()


@pytest.fixture
def joins(door: FakeDoor) -> Iterator[Connector]:
    found = Connector(door, None, SAID.append)  # type: ignore[arg-type]
    SAID.clear()
    yield found
    found.close()


@pytest.mark.parametrize("fault", [OSError(24, "Too many open files"), ChannelLost("birch", "its courier ended")])
def test_attempts_that_fail_grow_rarer(joins: Connector, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCourier, "faults", [fault] * 5)
    joins.want(["birch"])
    found: dict[str, Any] = {}
    until(lambda: found.update(joins.take()) or found)
    assert list(found) == ["birch"]
    gaps = np.diff(FakeCourier.begun)
    assert len(gaps) == 5
    assert (gaps >= [0.05, 0.1, 0.2, 0.4, 0.8]).all()


def test_who_comes_anew_does_not_wait(joins: Connector, door: FakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_RETRY_S", 0.01)
    monkeypatch.setattr(connector, "_LONGEST_RETRY_S", 1000.0)
    monkeypatch.setattr(FakeCourier, "faults", [ChannelLost("birch", "its courier ended")] * 8)
    joins.want(["birch"])
    until(lambda: joins._backoff.pauses_s().get("birch", 0.0) > 1)
    door.there = {"amber"}
    until(lambda: not joins._backoff.pauses_s())
    monkeypatch.setattr(FakeCourier, "faults", [])
    start = time.monotonic()
    door.there = {"amber", "birch"}
    until(lambda: joins.take())
    assert time.monotonic() - start < 0.6


@pytest.mark.parametrize(("failures", "said"), [(1, False), (2, True), (5, True)])
def test_why_a_link_does_not_come_up_is_said_once(
    joins: Connector, failures: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCourier, "faults", [ChannelLost("birch", "its certificate has expired")] * failures)
    joins.want(["birch"])
    until(lambda: joins.take())
    sentence = "cluster 'birch' is there again, but the link to it does not come up: its certificate has expired"
    assert [f"{sentence}; it is tried on"] * said == SAID
