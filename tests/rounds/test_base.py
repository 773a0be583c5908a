"""What encodes the last round."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.rounds.base import final_codec_for, keeps_state


@pytest.mark.parametrize(
    ("codec", "asked", "keep_unsent", "final"),
    [
        ("fp32", None, True, None),
        ("fp32", "int8", True, None),  # nothing is left unsent
        ("bf16", None, True, "bf16"),
        ("fp16", None, True, "fp16"),
        ("bf16", "fp32", True, "fp32"),
        ("int8", None, True, "int8"),
        ("int4", None, True, "int8"),
        ("topk:64/4096,2bit", None, True, "int8"),
        ("topk:64/4096,2bit", "bf16", True, "bf16"),
        ("lowrank:4", None, True, "int8"),
        ("randomk:0.1", None, True, "int8"),
        ("topk:64/4096,2bit", None, False, None),  # what is unsent has been counted several times
        ("topk:64/4096,2bit", "int8", False, "int8"),
    ],
)
def test_what_encodes_the_last_round(codec: str, asked: str | None, keep_unsent: bool, final: str | None) -> None:
    arguments = NebulaArguments(
        cluster="west",
        clusters="west,east",
        rendezvous="loopback",
        sync_strategy="local_steps",
        sync_codec=codec,
        sync_final_codec=asked,
        sync_keep_unsent=keep_unsent,
    )
    chosen = final_codec_for(arguments)
    assert (chosen and chosen.spec) == final


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({}, False),
        ({"sync_codec": "bf16"}, True),
        ({"sync_codec": "bf16", "sync_error_feedback": False}, False),
        ({"sync_codec": "dgc:0.01", "sync_error_feedback": False}, True),
        ({"sync_strategy": "local_steps"}, True),
    ],
)
def test_whose_checkpoints_need_a_state(settings: dict[str, object], keeps: bool) -> None:
    arguments = NebulaArguments(cluster="west", clusters="west,east", rendezvous="loopback", **settings)
    assert keeps_state(arguments) == keeps
