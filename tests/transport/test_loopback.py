"""Loopback: the contract between threads, the meeting place, and loss."""

from __future__ import annotations

import select
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddlenlp_nebula.errors import ChannelLost, NebulaError
from paddlenlp_nebula.transport.loopback import join_loopback, loopback_pair

from . import contract


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("chunk_bytes", [1024, 65536])
def test_contract(members: int, chunk_bytes: int) -> None:
    roster = ["west", "north", "east"][:members]

    def member(name: str) -> None:
        channels = join_loopback(name, roster, 10, chunk_bytes, 4)
        contract.run_all(name, channels, 4)
        contract.close_all(channels)

    with ThreadPoolExecutor(members) as pool:
        list(pool.map(member, roster))


def test_meeting_place_is_reusable_and_names_the_missing() -> None:
    for _ in range(2):
        with pytest.raises(NebulaError, match=r"waited 0.05 s .* for east, north"):
            join_loopback("west", ["west", "east", "north"], 0.05)
    assert join_loopback("alone", ["alone"], 1) == {}


def test_the_same_name_twice_is_refused() -> None:
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(join_loopback, "a", ["a", "b"], 0.3) for _ in range(2)]
        errors = sorted(str(join.exception()) for join in joins)
    assert "already waiting" in errors[0]
    assert "waited 0.3 s" in errors[1]


def test_loss_is_reported_after_what_had_arrived() -> None:
    west, east = loopback_pair("west", "east", 1024, 4)
    contract.send(west, b"one")
    contract.send(west, b"two")
    west.close()
    assert contract.receive(east) == b"one"
    east.progress()
    assert contract.receive(east) == b"two"
    assert east.reserve() is None
    with pytest.raises(ChannelLost, match="west"):
        east.progress()


def test_descriptor_rings_for_chunks_room_and_loss() -> None:
    west, east = loopback_pair("west", "east", 16, 1)
    for act in (lambda: contract.send(west, b"x"), west.close):
        east.progress()
        assert not select.select([east], [], [], 0)[0]
        act()
        assert select.select([east], [], [], 0)[0]
    east, west = loopback_pair("east", "west", 16, 1)
    contract.send(west, b"x")
    west.progress()
    contract.receive(east)
    assert select.select([west], [], [], 0)[0]
