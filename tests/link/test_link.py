"""The link: messages to members, bounded waiting, goodbyes, and peers that do not keep to the protocol."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable

import pytest

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link import streams
from paddlenlp_nebula.link.frames import HEADER_BYTES, Frame, Kind, checksum
from paddlenlp_nebula.link.gather import all_gather, all_gather_notes
from paddlenlp_nebula.link.link import EpochProposed, Link
from paddlenlp_nebula.link.notes import pack_note, parse_note
from paddlenlp_nebula.transport.channel import Channel

from .clusters import NAMES, at_once, everyone, meet


def pump(*links: Link) -> None:
    """Give every link a chance to move bytes."""
    for link in links:
        link.departures()


def put(link: Link, data: bytes, peer: str = "amber") -> None:
    """A chunk of a hostile peer's choice."""
    channel: Channel = link._streams[peer].channel
    chunk = channel.reserve()
    assert chunk is not None
    chunk[: len(data)] = data
    channel.commit(len(data))


def packed(kind: Kind, payload: bytes = b"", **fields: int) -> bytes:
    return Frame(kind, len(payload), checksum=checksum(payload), **fields).pack() + payload


# Messages


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 4000, 50_000])
def test_everyone_gets_everything_in_order(members: int, length: int) -> None:
    """Also what is larger than all chunks in flight, from all sides at once."""
    links = meet(*NAMES[:members])

    def part_of(name: str, part: int) -> bytes:
        return f"{name}{part}".encode() * (length // 6)

    def act(link: Link) -> list[tuple[int, str, bytes]]:
        parts = all_gather(link, Kind.BUCKET, 1, 5, lambda part: memoryview(part_of(link.cluster, part)))
        found = [(part, member, bytes(payload)) for part, member, payload in parts]
        link.flush()
        return found

    wanted = [(part, name, part_of(name, part)) for part in range(5) for name in NAMES[:members]]
    assert everyone(links, act) == dict.fromkeys(NAMES[:members], wanted)


def test_all_gather_produces_early_but_no_more_than_there_is_room_for() -> None:
    links = meet("amber", "birch", chunk_bytes=1024, chunks=4)
    produced = Counter[str]()

    def act(link: Link) -> int:
        def produce(part: int) -> memoryview:
            produced[link.cluster] += 1
            return memoryview(bytes(900))

        if link.cluster == "birch":
            while produced["amber"] < 4:
                time.sleep(0.01)
            time.sleep(0.1)  # amber is still alone
        early = produced["amber"]
        assert sum(len(payload) for _, _, payload in all_gather(link, Kind.BUCKET, 1, 40, produce)) == 2 * 40 * 900
        link.flush()
        return early

    assert everyone(links, act)["birch"] == 4
    assert produced == {"amber": 40, "birch": 40}


def test_notes_are_exchanged_and_counted() -> None:
    links = meet(*NAMES[:3])
    notes = everyone(links, lambda link: all_gather_notes(link, {"name": link.cluster, "x": [1, None]}, round=4))
    wanted = {name: {"name": name, "x": [1, None]} for name in NAMES[:3]}
    assert notes == dict.fromkeys(NAMES[:3], wanted)
    assert list(notes["cedar"]) == list(NAMES[:3])
    nbytes = HEADER_BYTES + len(json.dumps(wanted["amber"]))
    for link in links.values():
        assert link.bytes_sent == link.bytes_received == {"NOTE": 2 * nbytes}


def test_a_note_that_nobody_would_accept_is_not_sent() -> None:
    links = meet("amber", "birch")
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        all_gather_notes(links["amber"], {"x": "y" * 70_000})


def test_flush_waits_for_the_peer_to_take_it() -> None:
    links = meet("amber", "birch", chunk_bytes=1024, chunks=2)

    def receive() -> bytes:
        with links["birch"].receive("amber", Kind.PARAMETERS, part=3) as message:
            return bytes(message.payload)

    def send() -> None:
        links["amber"].post(Kind.PARAMETERS, b"p" * 50_000, part=3)
        links["amber"].flush()

    assert at_once({"send": send, "receive": receive}) == {"send": None, "receive": b"p" * 50_000}


def test_both_sides_flush_one_large_message() -> None:
    links = meet("amber", "birch", chunk_bytes=1024, chunks=2)

    def act(link: Link) -> int:
        link.post(Kind.PARAMETERS, bytes(50_000))
        link.flush()
        with link.receive(link.peers[0], Kind.PARAMETERS) as message:
            return len(message.payload)

    assert set(everyone(links, act).values()) == {50_000}


# Pings


@pytest.mark.parametrize("members", [2, 3, 4])
def test_round_trips_are_measured_whoever_measures_first(members: int) -> None:
    for _ in range(5):
        links = meet(*NAMES[:members], timeout_s=3.0)
        everyone(links, lambda link: (link.measure_rtt(), all_gather_notes(link, {})))
        for link in links.values():
            assert all(0 < rtt_s < 3 for rtt_s in link.rtt_s.values())


def test_a_ping_is_answered_while_waiting_for_somebody_else() -> None:
    amber, birch, cedar = meet(*NAMES[:3]).values()

    def wait_for_birch() -> None:
        with amber.receive("birch", Kind.VOTE):
            pass

    def measure() -> float:
        cedar.drop(PeerLost("birch", "the test wants it"))
        cedar.measure_rtt()
        birch.post(Kind.VOTE, to=["amber"])
        return cedar.rtt_s["amber"]

    outcomes = at_once({"amber": wait_for_birch, "cedar": measure})
    assert outcomes["amber"] is None
    assert 0 < outcomes["cedar"] < 5  # seconds after which it would have given amber up


# Waiting


@pytest.mark.parametrize(
    ("wait", "did"),
    [
        (lambda link: link.receive("birch", Kind.VOTE).__enter__(), "sent nothing"),
        (lambda link: link.measure_rtt(), "sent nothing"),
        (lambda link: (link.post(Kind.BUCKET, bytes(10_000)), link.flush()), "took nothing"),
        (lambda link: all_gather_notes(link, {}), "sent nothing"),
    ],
)
def test_a_silent_peer_is_waited_for_no_longer_than_agreed(wait: Callable[[Link], object], did: str) -> None:
    amber, _birch = meet("amber", "birch", timeout_s=0.4, chunk_bytes=1024).values()
    ticks = []
    amber.on_wait = lambda: ticks.append(time.monotonic())
    start = time.monotonic()
    with pytest.raises(PeerLost, match=rf"cluster 'birch' is gone: it {did} for 0.4 s \(sync_timeout_s\)"):
        wait(amber)
    taken_s = time.monotonic() - start
    assert 0.4 <= taken_s < 10
    assert len(ticks) >= 2
    assert 0.2 <= amber.seconds_waiting <= taken_s
    assert list(amber.departures()) == ["birch"]


def test_a_slow_peer_is_waited_for_as_long_as_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    amber, birch = meet("amber", "birch", timeout_s=1.5, chunk_bytes=128, chunks=1).values()
    channel = birch._streams["amber"].channel
    reserve, chunks = channel.reserve, [time.monotonic()]

    def slowly() -> memoryview | None:
        """A chunk every 0.2 s at most."""
        if time.monotonic() - chunks[-1] < 0.2 or (chunk := reserve()) is None:
            return None
        chunks.append(time.monotonic())
        return chunk

    def trickle() -> None:
        birch.post(Kind.BUCKET, bytes(10 * 128))
        while not birch._streams["amber"].idle():
            time.sleep(0.02)
            pump(birch)

    def receive() -> int:
        with amber.receive("birch", Kind.BUCKET) as message:
            return message.frame.length

    monkeypatch.setattr(channel, "reserve", slowly)
    start = time.monotonic()
    assert at_once({"birch": trickle, "amber": receive})["amber"] == 1280
    assert time.monotonic() - start > 1.5


def test_a_peer_is_waited_for_as_long_as_it_takes_in_what_it_was_sent() -> None:
    amber, birch = meet("amber", "birch", timeout_s=1.0).values()

    def take_in() -> None:
        for _ in range(8):
            time.sleep(0.2)
            amber._streams["birch"].channel.bytes_delivered += 128
        birch.post(Kind.VOTE)
        pump(birch)

    def receive() -> None:
        with amber.receive("birch", Kind.VOTE):
            pass

    start = time.monotonic()
    assert at_once({"birch": take_in, "amber": receive})["amber"] is None
    assert time.monotonic() - start > 1.5


def test_who_waits_for_another_shows_that_it_is_alive() -> None:
    """Cedar stops after its last word to amber but before that to birch: amber must not give up birch."""
    amber, birch, cedar = meet(*NAMES[:3], timeout_s=2.0).values()
    cedar.post(Kind.END, to=["amber"])

    def at_amber() -> None:
        for peer in ("cedar", "birch"):
            with amber.receive(peer, Kind.END):
                pass

    def at_birch() -> str:
        with pytest.raises(PeerLost) as lost, birch.receive("cedar", Kind.END):
            pass
        time.sleep(0.6)
        birch.post(Kind.END)
        return lost.value.peer

    outcomes = at_once({"amber": at_amber, "birch": at_birch})
    assert outcomes == {"amber": None, "birch": "cedar"}
    assert amber.bytes_received["WAITING"] >= HEADER_BYTES


# Goodbyes


@pytest.mark.parametrize("deliberate", [True, False])
def test_a_goodbye_reaches_the_others_with_its_reason(deliberate: bool) -> None:
    links = meet(*NAMES[:3])

    def act(link: Link) -> tuple[str, bool] | None:
        if link.cluster == "amber":
            link.post(Kind.VOTE, round=9)
            link.leave("its disk is full", deliberate=deliberate, linger_s=0.3)
            return None
        with link.receive("amber", Kind.VOTE, round=9):
            pass
        with pytest.raises(PeerLost) as lost, link.receive("amber", Kind.VOTE, round=10):
            pass
        return str(lost.value), lost.value.deliberate

    outcomes = everyone(links, act)
    for name in NAMES[1:3]:
        assert outcomes[name] == ("cluster 'amber' is gone: its disk is full", deliberate)


def test_a_deliberate_end_does_not_wait_for_those_who_also_left() -> None:
    links = meet(*NAMES, timeout_s=20.0)
    start = time.monotonic()
    everyone(
        links, lambda link: (link.leave("its training is complete", deliberate=True), link.leave("x", deliberate=True))
    )
    assert time.monotonic() - start < 5  # the linger of a single one


def test_departures_are_known_without_waiting() -> None:
    amber, birch, cedar = meet(*NAMES[:3]).values()
    assert amber.departures() == {}
    birch.leave("it failed", deliberate=False, linger_s=0.1)
    cedar.close()
    found = amber.departures()
    assert {name: lost.reason for name, lost in found.items()} == {
        "birch": "it failed",
        "cedar": "the other side has closed it",
    }
    amber.drop(PeerLost("birch", "the test wants it"))
    assert list(amber.departures()) == ["cedar"]
    assert amber.members == ("amber", "cedar")


def test_who_is_dropped_hears_why() -> None:
    amber, birch = meet("amber", "birch").values()
    amber.drop(PeerLost("birch", "it sent nothing for 600 s"))
    with pytest.raises(PeerLost, match="it goes on without this cluster: it sent nothing for 600 s"):
        all_gather_notes(birch, {})


@pytest.mark.parametrize("reason", ["it goes on without this cluster", "it goes on without this cluster: a stall"])
def test_two_that_drop_each_other_say_so_once(reason: str) -> None:
    amber, birch = meet("amber", "birch").values()
    amber.drop(PeerLost("birch", reason))
    with pytest.raises(PeerLost) as caught:
        all_gather_notes(birch, {})
    assert caught.value.reason == reason


def test_posts_to_a_lost_peer_go_nowhere() -> None:
    amber, birch = meet("amber", "birch").values()
    birch.close()
    amber.post(Kind.BUCKET, bytes(100_000))
    with pytest.raises(PeerLost):
        amber.flush()
    amber.drop(PeerLost("birch", "the test wants it"))
    amber.post(Kind.BUCKET, b"x", to=["birch"])
    with pytest.raises(PeerLost, match="is gone"), amber.receive("birch", Kind.VOTE):
        pass
    amber.close()
    amber.close()


# A peer that does not keep to the protocol


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (b"\x80\x04cbuiltins\neval" + bytes(40), "must start with b'NEB1'"),
        (Frame(Kind.NOTE, 2**60).pack(), "announces 1152921504606846976 bytes"),
        (packed(Kind.NOTE, b"{}")[:-1] + b"]", "does not match its checksum"),
        (b"NEB1\x7f\xff" + bytes(38), "has the unknown kind 32767"),
        (packed(Kind.NOTE, b"[1]", round=7), "must be a JSON object, got"),
        (packed(Kind.NOTE, b"\xff\xfe", round=7), "must be JSON, got"),
        (packed(Kind.NOTE, b"[" * 4000, round=7), "must be JSON, got"),
        (packed(Kind.LEAVE, b"[" * 4000), "must be JSON, got"),
        (packed(Kind.LEAVE, b"{"), "must be JSON, got"),
        (packed(Kind.VOTE, b"?"), "announces 1 bytes, the limit is 0"),
    ],
)
def test_a_peer_that_violates_the_protocol_is_lost_with_the_reason(chunk: bytes, reason: str) -> None:
    amber, birch, cedar = meet(*NAMES[:3], chunk_bytes=8192).values()
    put(birch, chunk)
    put(birch, packed(Kind.VOTE))  # and whatever follows does not count
    with pytest.raises(PeerLost, match=reason) as lost:
        all_gather_notes(amber, {}, round=7)
    assert lost.value.peer == "birch"
    for _ in range(3):
        assert list(amber.departures()) == ["birch"]
    cedar.post(Kind.VOTE, to=["amber"])  # the others are not affected
    with amber.receive("cedar", Kind.VOTE):
        pass


def test_another_exchange_than_expected_is_an_error_on_both_sides() -> None:
    links = meet("amber", "birch")
    outcomes = at_once(
        {
            "amber": lambda: all_gather_notes(links["amber"], {}, round=3),
            "birch": lambda: list(all_gather(links["birch"], Kind.BUCKET, 3, 1, lambda part: memoryview(b"x"))),
        }
    )
    assert "expected NOTE (round 3, part 0) from cluster 'birch', got BUCKET (round 3, part 0)" in str(
        outcomes["amber"]
    )
    assert "expected BUCKET (round 3, part 0) from cluster 'amber', got NOTE (round 3" in str(outcomes["birch"])
    assert {type(outcome) for outcome in outcomes.values()} == {NebulaError}


def test_a_proposal_interrupts_and_stays_to_be_read() -> None:
    amber, birch = meet("amber", "birch").values()
    birch.post(Kind.VOTE, round=1)
    birch.post(Kind.EPOCH, b'{"members": 1}')
    with amber.receive("birch", Kind.VOTE, round=1):
        pass
    for _ in range(2):
        with pytest.raises(EpochProposed, match="cluster 'birch' has lost another"), amber.receive("birch", Kind.VOTE):
            pass
    with amber.receive_epoch("birch") as (epoch, note):
        assert (epoch, note) == (0, {"members": 1})


def test_messages_of_an_earlier_epoch_are_void() -> None:
    amber, birch = meet("amber", "birch").values()
    birch.post(Kind.VOTE, round=1)
    amber.epoch = birch.epoch = 1
    birch.post(Kind.VOTE, round=2)
    with amber.receive("birch", Kind.VOTE, round=2):
        pass


def test_who_sends_without_end_keeps_nobody_from_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PORTION", 8)
    amber, birch = meet("amber", "birch", chunks=64).values()
    for _ in range(20):
        birch.post(Kind.PING)
    birch.post(Kind.NOTE, pack_note({"a": 1}), round=3)
    assert amber.departures() == {}
    assert amber.bytes_sent["PONG"] == 8 * HEADER_BYTES
    with amber.receive("birch", Kind.NOTE, round=3) as message:
        assert parse_note(message.payload, "NOTE", "birch") == {"a": 1}
    assert amber.bytes_sent["PONG"] == 20 * HEADER_BYTES
