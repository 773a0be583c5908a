"""The handshake: any difference is one sentence, the same on every cluster, naming both values."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_nebula.errors import HandshakeError, PeerLost
from paddlenlp_nebula.link import handshake
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.handshake import compare, shake_hands
from paddlenlp_nebula.link.link import Link

from .clusters import NAMES, at_once, everyone, meet

HELLO = {"selection": "2 parameters", "max_steps": 100, "learning_rate": 3e-5, "precision": "fp32", "frozen": "ab"}


def hellos(*changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**HELLO, **change} for name, change in zip(NAMES, changes, strict=False)}


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (({}, {}), []),
        (({}, {"max_steps": 90}), ["'amber' has max_steps=100 but cluster 'birch' has max_steps=90: set the same"]),
        (({}, {}, {"max_steps": 90}), ["'amber' has max_steps=100 but cluster 'cedar' has max_steps=90"]),
        (
            ({"frozen": "x"}, {}),
            ["'amber' has frozen='x' but cluster 'birch' has frozen='ab': the parameters that do not"],
        ),
        (
            ({}, {"precision": "bf16 O1", "learning_rate": 1e-5}),
            ["learning_rate=3e-05 but cluster 'birch' has learning_rate=1e-05", "precision='fp32' but cluster 'birch'"],
        ),
        (({}, {"new": 1}), ["'amber' has new=None but cluster 'birch' has new=1: set the same new on all"]),
        (({"new": 1}, {}), ["'amber' has new=1 but cluster 'birch' has new=None"]),
        (({}, {"max_steps": True}), ["max_steps=True"]),
        (({"round": 44, "global_step": 40}, {"round": 22, "global_step": 20}), ["global_step=20: resume all clusters"]),
        (({"round": 44, "global_step": 40}, {"round": 41, "global_step": 40}), ["round=41: their checkpoints are not"]),
        (({}, {"max_steps": [1, {}]}), ["max_steps=[1, {}]"]),
        (({"known:optimizer_state": None}, {"known:optimizer_state": "a"}, {"known:optimizer_state": "a"}), []),
        (({"known:optimizer_state": "a"}, {}), []),
        (
            ({"known:optimizer_state": None}, {"known:optimizer_state": "a"}, {"known:optimizer_state": "b"}),
            [
                "'birch' has optimizer_state='a' but cluster 'cedar' has optimizer_state='b': their checkpoints are not of"
            ],
        ),
        (
            (
                {"known:optimizer_state": "a", "lr_scheduler_state": "c", "global_step": 3},
                {"known:optimizer_state": "b", "lr_scheduler_state": "d", "global_step": 6},
            ),
            ["global_step=6: resume all clusters"],
        ),
        (
            ({"nebula_state": "there", "initial": "x"}, {"nebula_state": "missing", "initial": None}),
            ["nebula_state='missing': put the cluster's own"],
        ),
        (({"nebula_state": "there", "global_step": 4}, {"nebula_state": None, "global_step": 0}), ["global_step=0"]),
        (({"sync_init": "verify", "initial": "x"}, {"sync_init": "broadcast", "initial": None}), ["sync_init='broad"]),
        (({"selection": "2 parameters", "frozen": "x"}, {"selection": "4 parameters"}), ["selection='4 parameters'"]),
    ],
)
def test_each_difference_is_a_sentence(changes: tuple[dict[str, Any], ...], sentences: list[str]) -> None:
    found = compare(hellos(*changes))
    assert len(found) == len(sentences)
    for sentence, wanted in zip(found, sentences, strict=True):
        assert wanted in sentence


@pytest.mark.parametrize(
    ("values", "sentences"),
    [
        (["a:/x", "b:/x", "a:/y"], []),
        (["a:/x", "b:/x", "a:/x"], ["clusters 'amber' and 'cedar' both have output_dir=\"a:/x\": two clusters on one"]),
        ([[], {}, []], ["clusters 'amber' and 'cedar' both have output_dir=[]"]),
    ],
)
def test_some_fields_must_differ(values: list[Any], sentences: list[str]) -> None:
    found = compare(hellos(*({"unique:output_dir": value} for value in values)))
    assert len(found) == len(sentences)
    for sentence, wanted in zip(found, sentences, strict=True):
        assert wanted in sentence


@pytest.mark.parametrize("members", [2, 3])
def test_all_fail_with_the_same_words(members: int) -> None:
    links = meet(*NAMES[:members])
    odd = NAMES[members - 1]
    steps = {name: 200 if name == odd else 100 for name in links}
    outcomes = at_once(
        {
            name: lambda link=link: shake_hands(link, {**HELLO, "max_steps": steps[link.cluster]})
            for name, link in links.items()
        }
    )
    assert {type(outcome) for outcome in outcomes.values()} == {HandshakeError}
    assert len({str(outcome) for outcome in outcomes.values()}) == 1
    assert f"'amber' has max_steps=100 but cluster '{odd}' has max_steps=200" in str(outcomes["amber"])


def test_agreement_is_silent() -> None:
    everyone(meet(*NAMES), lambda link: shake_hands(link, HELLO))


def test_another_protocol_version_is_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    links = meet("amber", "birch")

    def old_release(link: Link) -> None:
        link.post(Kind.HELLO, b'{"protocol": 0, "max_steps": 100}')
        with link.receive("amber", Kind.HELLO):
            pass

    outcomes = at_once(
        {"amber": lambda: shake_hands(links["amber"], {"max_steps": 100}), "birch": lambda: old_release(links["birch"])}
    )
    assert f"protocol={handshake.PROTOCOL_VERSION} but cluster 'birch' has protocol=0: install the same release" in str(
        outcomes["amber"]
    )


def test_who_is_lost_meanwhile_is_named() -> None:
    amber, birch = meet("amber", "birch").values()
    birch.leave("it failed with ValueError: no such model", deliberate=False, linger_s=0.05)
    with pytest.raises(PeerLost, match="cluster 'birch' is gone: it failed with ValueError: no such model"):
        shake_hands(amber, HELLO)
