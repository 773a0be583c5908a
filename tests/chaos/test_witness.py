"""The checks of a chaos run find what they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.play import problems
from tests.chaos.schedule import Fault
from tests.chaos.witness import Done, Return, Said, Witness, needless, unreported

T = 5.0
LOST = "cluster 'east' was lost after exchange 8: it sent nothing for 5 s; members now: west, mid"


def done(what: str, *target: str, began: float = 100.0, lasts: float = 0.0, noticed: bool = True) -> Done:
    return Done(Fault(50, what, target, lasts, noticed, 0), began, began + lasts)


def test_a_loss_must_be_reported() -> None:
    kill = done("kill trainer", "east")
    assert unreported([kill], [], T) == [kill]
    assert unreported([kill], [Said(101, "west", LOST)], T) == []
    assert unreported([kill], [Said(99, "west", LOST)], T) == [kill]  # that was another one
    assert unreported([kill], [Said(130, "west", LOST)], T) == [kill]
    assert unreported([kill], [Said(101, "west", LOST.replace("'east'", "'mid'"))], T) == [kill]
    assert unreported([kill], [Said(101, "west", "step 7 was not taken")], T) == [kill]


def test_what_breaks_between_two_may_be_either_ones() -> None:
    pair = done("cut pair", "east", "mid", lasts=12)
    assert unreported([pair], [Said(106, "west", LOST)], T) == []
    courier = done("kill courier", "mid")
    assert unreported([courier], [Said(101, "mid", LOST)], T) == []
    assert unreported([courier], [Said(101, "west", LOST)], T) == [courier]


def test_who_must_not_notice() -> None:
    assert unreported([replace(done("stop trainer", "east", lasts=9), together=False)], [], T) == []
    assert unreported([done("cut cluster briefly", "east", noticed=False)], [], T) == []


def test_a_loss_must_have_a_reason() -> None:
    said = [Said(101, "west", LOST)]
    assert needless([], said, T) == said
    assert needless([done("cut cluster briefly", "east", noticed=False)], said, T) == said
    assert needless([done("kill trainer", "east")], said, T) == []
    assert needless([done("damage above TCP", "east", noticed=False)], said, T) == []


def test_what_was_said_before_a_kill_counts(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    def write(degradations: list[str], *rounds: int) -> None:
        entries = [{"round": number, "members": 3} for number in rounds]
        report = {"degradations": degradations, "per_round": entries, "members": ["west", "mid"]}
        (tmp_path / "out" / "nebula_report.json").write_text(json.dumps(report))
        witness.look()

    witness = Witness({"west": tmp_path})
    write([LOST], 1, 2)
    write([LOST], 1, 2, 3)
    write([], 1)  # from its last checkpoint
    write([LOST], 1, 2)
    assert [word.sentence for word in witness.said] == [LOST, LOST]
    assert sorted(witness.rounds["west"]) == [1, 2, 3]
    assert witness.members == {"west": ["west", "mid"]}


def test_who_is_together() -> None:
    witness = Witness({name: Path("/nowhere") for name in ("west", "mid", "east")})
    witness.members |= {"west": ["west", "mid"], "mid": ["west", "mid"], "east": ["east"]}
    assert witness.together(done("kill trainer", "mid").fault)
    assert not witness.together(done("kill trainer", "east").fault)
    assert witness.together(done("cut pair", "mid", "west").fault)
    assert not witness.together(done("cut pair", "east", "west").fault)


def test_returns() -> None:
    back = "cluster 'east' is back at exchange 12: "
    merged = "the 320 samples that it has trained on alone are merged, with a share of 0.2; members now: west, east"
    dropped = "the 1.5e+03 samples that it has trained on alone are dropped: it remembers no round that the others do"
    assert Said(1, "west", back + merged).back == Return("east", 12, 320, True)
    assert Said(1, "west", back + dropped).back == Return("east", 12, 1500, False)
    assert Said(1, "west", back + "it brings nothing; members now: west").back == Return("east", 12, 0, False)
    assert Said(1, "west", LOST).back is None


def test_problems() -> None:
    good: dict[str, Any] = {"hangs": 0, "unreported": [], "needless_losses": [], "crashes": {}, "digests_equal": True}
    assert problems(good) == []
    for bad in (
        {"hangs": 1, "hang": "west has taken no step"},
        {"unreported": [{"what": "kill trainer"}]},
        {"needless_losses": [LOST]},
        {"crashes": {"mid": ["exit code 1"]}},
        {"digests_equal": False, "digests": {}, "members": {}},
    ):
        assert len(problems({**good, **bad})) == 1
