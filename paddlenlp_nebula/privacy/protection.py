"""What hides an update on its way into the average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.privacy.gaussian import GaussianMechanism
from paddlenlp_nebula.privacy.secure import SecureAggregation

__all__ = ["UNPROTECTED", "Protection"]


@dataclass(frozen=True)
class Protection:
    """Either, both or neither.

    Attributes:
        gaussian: bounds what this member sends, and adds noise, before anything else is done with it.
        secure: averages instead of a codec.
    """

    gaussian: GaussianMechanism | None = None
    secure: SecureAggregation | None = None

    @property
    def norm(self) -> float | None:
        """See `GaussianMechanism`."""
        return None if self.gaussian is None else self.gaussian.norm

    def bound(
        self, buckets: Sequence[Bucket], produce: Callable[[Bucket], Any], share: Mapping[str, np.float32]
    ) -> Callable[[Bucket], Any]:
        """See `GaussianMechanism.protect`."""
        return produce if self.gaussian is None else self.gaussian.protect(buckets, produce, share)


UNPROTECTED = Protection()
