"""The settings' choice of what hides this cluster's updates."""

from __future__ import annotations

from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.privacy.accountant import Accountant
from paddlenlp_nebula.privacy.arguments import PrivacySettings
from paddlenlp_nebula.privacy.gaussian import GaussianMechanism

__all__ = ["JOURNAL_NAME", "accountant_for", "facts_for", "gaussian_for"]

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


def gaussian_for(settings: PrivacySettings, accountant: Accountant | None) -> GaussianMechanism | None:
    """Clips, and adds noise if there is an accountant; None if neither is asked for."""
    return None if settings.privacy_clip_norm is None else GaussianMechanism(settings.privacy_clip_norm, accountant)


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
