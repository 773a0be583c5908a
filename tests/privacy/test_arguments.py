"""The settings of privacy: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.privacy import arguments as module

TWO = {"cluster": "west", "clusters": "west,east", "rendezvous": "loopback"}
THREE = {**TWO, "clusters": "west,east,north"}
CLIP = {"privacy_clip_norm": 1.0}
NOISE = {**CLIP, "privacy_noise_multiplier": 0.5, "sync_weight": "equal", "sync_quorum": 2}
SECURE = {"privacy_secure_aggregation": True, "sync_quorum": 3}
LOCAL = {"sync_strategy": "local_steps"}


def problems(**fields: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as wrong:
        NebulaArguments(**fields)
    return wrong.value.problems


@pytest.mark.parametrize(
    "settings",
    [
        {**TWO, **CLIP},
        {**TWO, **NOISE},
        {**TWO, **NOISE, "privacy_delta": 1e-6},
        {**TWO, **NOISE, "sync_codec": "int8", "sync_error_feedback": False},
        {**TWO, **NOISE, **LOCAL, "sync_fragments": 2, "sync_lora_merge": "freeze_a"},
        {**THREE, **SECURE},
        {**THREE, **SECURE, **NOISE, "sync_quorum": 3},
    ],
)
def test_what_goes_together(settings: dict[str, Any]) -> None:
    arguments = NebulaArguments(**settings)
    assert arguments.hides_updates == (settings != {**TWO, **CLIP})  # a bound alone hides nothing


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), 1e13, "1"])
def test_a_bound_is_a_positive_number(value: Any) -> None:
    (sentence,) = problems(**TWO, privacy_clip_norm=value)
    assert sentence == f"privacy_clip_norm must be a positive number, at most 1e+12, got {value!r}"


@pytest.mark.parametrize("value", [-1.0, 0.009, float("nan"), float("inf"), "1", None])
def test_noise_is_nothing_or_enough_to_matter(value: Any) -> None:
    (sentence,) = problems(**TWO, **{**NOISE, "privacy_noise_multiplier": value})
    assert sentence.startswith("privacy_noise_multiplier must be 0 or a number from 0.01")
    assert sentence.endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-5, float("nan"), "1e-5"])
def test_delta_is_a_probability(value: Any) -> None:
    (sentence,) = problems(**TWO, **NOISE, privacy_delta=value)
    assert sentence == f"privacy_delta must be a number between 0 and 1, got {value!r}"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({**TWO, "privacy_noise_multiplier": 1.0}, "is in units of privacy_clip_norm, got no such bound"),
        ({**TWO, "privacy_delta": 1e-6}, "privacy_delta acts only with privacy_noise_multiplier, got 1e-06"),
        ({**TWO, **NOISE, "sync_weight": "samples"}, "needs sync_weight='equal'"),
        ({**TWO, **NOISE, "sync_quorum": 1}, "needs sync_quorum of 2 and more"),
        ({**TWO, **NOISE, "clusters": "west", "sync_quorum": 1}, "needs two clusters and more, got one"),
        ({**TWO, **CLIP, "sync_codec": "dgc:0.001"}, "adds what it left out of earlier ones: use fp32"),
        ({**TWO, **NOISE, "sync_codec": "int8"}, "error feedback adds what sync_codec='int8' left out"),
        ({**TWO, **CLIP, **LOCAL, "sync_codec": "topk:64/4096,2bit"}, "set sync_error_feedback=false"),
        ({**TWO, **CLIP, **LOCAL, "sync_lora_merge": "product"}, "privacy_clip_norm hides or bounds a sum"),
        ({**TWO, **CLIP, "sync_backend": "device"}, "privacy_clip_norm works on the host"),
        ({**TWO, **SECURE, "sync_quorum": 2}, "needs three clusters and more, got 2: with two, each computes"),
        ({**THREE, **SECURE, "sync_quorum": 2}, "needs sync_quorum of 3 and more"),
        ({**THREE, **SECURE, "sync_codec": "bf16"}, "needs sync_codec='fp32', which it sends as masked"),
        ({**THREE, **SECURE, **LOCAL, "sync_lora_merge": "product"}, "merges single updates"),
        ({**THREE, **SECURE, "rendezvous": "world", "sync_security": "none"}, "needs sync_security='tls'"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], wanted: str) -> None:
    (sentence,) = problems(**settings)
    assert wanted in sentence


def test_a_missing_accountant_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    (sentence,) = problems(**TWO, **NOISE)
    assert sentence == (
        "privacy_noise_multiplier needs the package dp-accounting, which is not installed: pip install "
        "'paddlenlp-nebula[privacy]'"
    )
    NebulaArguments(**TWO, **CLIP)
