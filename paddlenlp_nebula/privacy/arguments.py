"""The settings of privacy, which `NebulaArguments` takes over, and what does not go together with them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Optional, Protocol  # PdArgumentParser cannot read "str | None"

from paddlenlp_nebula.codec.codec import Codec
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["PrivacyArguments", "PrivacySettings", "privacy_problems"]

_LARGEST = 1e12  # squares and products stay far from float32's limits
_LEAST_NOISE = 0.01  # one round at this multiplier has an epsilon of 5,000
_DELTA = 1e-5


@dataclass(kw_only=True)
class PrivacyArguments:
    """What is hidden of this cluster's updates, and from whom: see docs/privacy.md."""

    privacy_clip_norm: Optional[float] = field(
        default=None,
        metadata={
            "help": "Scale this cluster's update of a round (its gradient under every_step, its change of the parameters "
            "under local_steps) down to this L2 norm, all selected parameters together, if it is larger."
        },
    )
    privacy_noise_multiplier: float = field(
        default=0.0,
        metadata={
            "help": "Add Gaussian noise to the updates: of this many times privacy_clip_norm in the sum over all clusters, "
            "of which each adds its part (differential privacy of a cluster's data; needs dp-accounting)."
        },
    )
    privacy_delta: float = field(
        default=_DELTA, metadata={"help": "The delta for which the report gives the epsilon of that noise."}
    )
    privacy_secure_aggregation: bool = field(
        default=False,
        metadata={
            "help": "Hide each update from the other clusters by masks that cancel in the sum (three clusters and more)."
        },
    )

    @property
    def hides_updates(self) -> bool:
        """Whether nothing that depends on a single cluster's data may travel beside its update."""
        return self.privacy_noise_multiplier > 0 or self.privacy_secure_aggregation

    @property
    def drops_work_done_alone(self) -> bool:
        """Whether what a cluster that comes back has learned alone is not merged: it is neither bounded nor hidden."""
        return self.hides_updates or self.privacy_clip_norm is not None


class PrivacySettings(Protocol):
    """The fields of `NebulaArguments` that matter here."""

    privacy_clip_norm: Optional[float]
    privacy_noise_multiplier: float
    privacy_delta: float
    privacy_secure_aggregation: bool
    rendezvous: Optional[str]
    sync_backend: str
    sync_codec: str
    sync_error_feedback: bool
    sync_lora_merge: str
    sync_quorum: int
    sync_security: Optional[str]
    sync_weight: str

    @property
    def cluster_names(self) -> tuple[str, ...]: ...


def privacy_problems(settings: PrivacySettings) -> list[str]:
    """One sentence for each thing about privacy that is wrong; empty when all is well."""
    if found := _range_problems(settings):
        return found  # what follows compares them
    on = _switched_on(settings)
    if on is None:
        return []
    if settings.sync_lora_merge == "product":
        found.append(
            f"{on} hides or bounds a sum, and sync_lora_merge='product' merges single updates: use 'mean' or 'freeze_a'"
        )
    if settings.sync_backend == "device":
        found.append(f"{on} works on the host: set sync_backend to 'auto' or 'host', got 'device'")
    with contextlib.suppress(ConfigurationError):  # which is said elsewhere
        found += _codec_problems(settings, on, codec_from_spec(settings.sync_codec))
    if settings.privacy_noise_multiplier > 0:
        found += _noise_problems(settings)
    if settings.privacy_secure_aggregation:
        found += _secure_problems(settings)
    return found


def _switched_on(settings: PrivacySettings) -> str | None:
    """The field to blame, or None if nothing is asked for."""
    if settings.privacy_secure_aggregation:
        return "privacy_secure_aggregation"
    return None if settings.privacy_clip_norm is None else "privacy_clip_norm"


def _range_problems(settings: PrivacySettings) -> list[str]:
    found = []
    clip, noise, delta = settings.privacy_clip_norm, settings.privacy_noise_multiplier, settings.privacy_delta
    if clip is not None and not (_is_number(clip) and 0 < clip <= _LARGEST):
        found.append(f"privacy_clip_norm must be a positive number, at most {_LARGEST:g}, got {clip!r}")
    if not (_is_number(noise) and (noise == 0 or _LEAST_NOISE <= noise <= _LARGEST)):
        found.append(
            f"privacy_noise_multiplier must be 0 or a number from {_LEAST_NOISE} (which hides nothing: epsilon 5,000 in "
            f"a single round) to {_LARGEST:g}, got {noise!r}"
        )
    elif noise > 0 and clip is None:
        found.append(
            "privacy_noise_multiplier is in units of privacy_clip_norm, got no such bound: set it, or leave the noise out"
        )
    if not (_is_number(delta) and 0 < delta < 1):
        found.append(f"privacy_delta must be a number between 0 and 1, got {delta!r}")
    elif delta != _DELTA and noise == 0:
        found.append(f"privacy_delta acts only with privacy_noise_multiplier, got {delta!r}: leave it out")
    return found


def _codec_problems(settings: PrivacySettings, on: str, codec: Codec) -> list[str]:
    if settings.privacy_secure_aggregation and settings.sync_codec != "fp32":
        return [
            "privacy_secure_aggregation needs sync_codec='fp32', which it sends as masked fixed-point numbers, since masks "
            f"cancel only in a plain sum, got {settings.sync_codec!r}"
        ]
    if codec.own_feedback:
        return [
            f"{on} bounds what a round sends, and sync_codec={settings.sync_codec!r} adds what it left out of earlier ones: "
            "use fp32, or another codec with sync_error_feedback=false"
        ]
    if settings.sync_error_feedback and not codec.lossless:
        return [
            f"{on} bounds what a round sends, and error feedback adds what sync_codec={settings.sync_codec!r} left out of "
            "earlier ones: set sync_error_feedback=false, or sync_codec='fp32'"
        ]
    return []


def _noise_problems(settings: PrivacySettings) -> list[str]:
    found = []
    if len(settings.cluster_names) < 2:
        found.append("privacy_noise_multiplier needs two clusters and more, got one, whose updates nobody sees")
    elif settings.sync_quorum < 2:
        found.append(
            "privacy_noise_multiplier needs sync_quorum of 2 and more, since the parameters of a cluster that goes on "
            f"alone have no noise, got {settings.sync_quorum}"
        )
    if settings.sync_weight != "equal":
        found.append(
            "privacy_noise_multiplier needs sync_weight='equal', since weights that depend on the data change what a "
            f"cluster can add to the average, and tell how much data it has, got {settings.sync_weight!r}"
        )
    if find_spec("dp_accounting") is None:
        found.append(
            "privacy_noise_multiplier needs the package dp-accounting, which is not installed: pip install "
            "'paddlenlp-nebula[privacy]'"
        )
    return found


def _secure_problems(settings: PrivacySettings) -> list[str]:
    found = []
    if (count := len(settings.cluster_names)) < 3:
        found.append(
            f"privacy_secure_aggregation needs three clusters and more, got {count}: with two, each computes the other's "
            "update from the sum"
        )
    elif settings.sync_quorum < 3:
        found.append(
            "privacy_secure_aggregation needs sync_quorum of 3 and more, since two clusters can hide nothing from each "
            f"other, got {settings.sync_quorum}"
        )
    if settings.sync_security != "tls" and settings.rendezvous != "loopback":
        found.append(
            "privacy_secure_aggregation needs sync_security='tls', without which anybody on the way could put keys of "
            f"their own in the place of the clusters', got {settings.sync_security!r}"
        )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
