"""Settings that are worth a sentence at the start, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.doubts import STALE_STEPS, doubts


def doubted(**settings: Any) -> list[str]:
    return doubts(NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback", **settings))


LOCAL = {"sync_strategy": "local_steps"}
DGC = {"sync_codec": "dgc:0.01"}
SPARSE_LORA = {
    **LOCAL,
    "sync_parameters": "adapters",
    "sync_codec": "topk:64/4096,2bit",
    "sync_every": "30",
}


def test_defaults_are_not_doubted() -> None:
    assert doubted() == doubted(**LOCAL) == doubted(**DGC) == []
    assert doubted(sync_error_feedback=False) == []  # which takes nothing from fp32
    assert doubted(**LOCAL, sync_codec="int4", sync_keep_unsent=True, sync_final_codec="int8") == []


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"sync_every": "20"}, "sync_every=20 has no effect"),
        (
            {"sync_feedback_decay": 0.95},
            "sync_feedback_decay=0.95 has no effect: sync_codec='fp32' leaves nothing unsent",
        ),
        (LOCAL | {"sync_keep_unsent": True}, "sync_keep_unsent=True has no effect: sync_codec='fp32' leaves"),
        (LOCAL | {"sync_final_codec": "int8"}, "sync_final_codec=int8 has no effect: sync_codec='fp32' leaves"),
        (DGC | {"sync_error_feedback": False}, "sync_error_feedback=False has no effect: sync_codec='dgc:0.01' keeps"),
        (DGC | {"sync_feedback_decay": 0.9}, "sync_feedback_decay=0.9 has no effect: sync_codec='dgc:0.01' keeps"),
    ],
)
def test_what_has_no_effect(settings: dict[str, Any], start: str) -> None:
    (sentence,) = doubted(**settings)
    assert sentence.startswith(start)


def test_stale_errors_in_lora() -> None:
    (sentence,) = doubted(**SPARSE_LORA)
    assert "with sync_every=30 sends each element of the adapters about once in 1920 steps" in sentence
    assert doubted(**SPARSE_LORA | {"sync_feedback_decay": 0.95, "sync_every": "2..5"})
    assert 64 * 3 < STALE_STEPS < 64 * 4


@pytest.mark.parametrize(
    "change",
    [
        {"sync_every": "3"},
        {"sync_codec": "topk:512/4096,4bit"},
        {"sync_codec": "int4"},
        {"sync_keep_unsent": True},
        {"sync_error_feedback": False},
        {"sync_feedback_decay": 0.8},
        {"sync_parameters": "trainable"},
    ],
)
def test_what_is_no_doubt_about_lora(change: dict[str, Any]) -> None:
    assert doubted(**SPARSE_LORA | change) == []
