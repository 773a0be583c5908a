"""The settings' choice of what hides this cluster's updates."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.privacy.accountant import Accountant
from paddlenlp_nebula.privacy.arguments import PrivacySettings
from paddlenlp_nebula.privacy.fixed_point import fixed_point_for
from paddlenlp_nebula.privacy.gaussian import GaussianMechanism
from paddlenlp_nebula.privacy.protection import Protection
from paddlenlp_nebula.privacy.secure import SecureAggregation

__all__ = ["JOURNAL_NAME", "accountant_for", "facts_for", "protection_for"]

JOURNAL_NAME = "nebula_privacy.json"


def accountant_for(settings: PrivacySettings) -> Accountant | None:
    """Counts the rounds, if there is noise in them."""
    if settings.privacy_noise_multiplier == 0:
        return None
    return Accountant(
        settings.privacy_noise_multiplier,
        len(settings.cluster_names),
        settings.privacy_delta,
        summed=codec_from_spec(settings.sync_codec).lossless,
        hidden=settings.privacy_secure_aggregation,
    )


def protection_for(settings: PrivacySettings, accountant: Accountant | None, names: Sequence[str]) -> Protection:
    """What is asked for.

    Args:
        settings: the user's.
        accountant: that of `accountant_for`.
        names: of the parameters that travel.
    """
    bound, secure = settings.privacy_clip_norm, None
    if settings.privacy_secure_aggregation:
        noise = accountant.own_multiplier * bound if accountant is not None and bound is not None else 0.0
        secure = SecureAggregation(fixed_point_for(bound, noise), names)
    return Protection(None if bound is None else GaussianMechanism(bound, accountant), secure)


def facts_for(settings: PrivacySettings) -> dict[str, float | bool]:
    """What the report says of the settings; empty if nothing is asked for."""
    facts: dict[str, float | bool] = {}
    if settings.privacy_clip_norm is not None:
        facts["privacy_clip_norm"] = settings.privacy_clip_norm
    if settings.privacy_noise_multiplier > 0:
        facts["privacy_noise_multiplier"] = settings.privacy_noise_multiplier
    if settings.privacy_secure_aggregation:
        facts["privacy_secure_aggregation"] = True
    return facts
