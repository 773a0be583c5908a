"""The Gaussian mechanism on one cluster's update: a bound on its norm, then noise.

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models" (arXiv 1710.06963), where a
user is what a cluster is here; each cluster draws its own part of the noise, as in Kairouz et al. 2021 (arXiv 2102.06387).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.privacy.accountant import Accountant
from paddlenlp_nebula.privacy.keystream import KEY_BYTES, keystream

__all__ = ["LARGEST_NORMAL", "GaussianMechanism", "clip_factor", "normal"]

LARGEST_NORMAL = 8.6
"""Above all that `normal` can give: sqrt(2 ln 2^53)."""

Produce = Callable[[Bucket], Float32Vector]


class GaussianMechanism:
    """Clips what this cluster sends in a round, and adds its part of the noise; before any codec.

    Args:
        clip_norm: the largest L2 norm of what is sent, all its buckets together.
        accountant: knows how much noise is wanted, and counts what it costs; None: only clip.

    Attributes:
        norm: of the latest update, before it was bounded; it has no noise, so it is for this cluster's own report.
    """

    def __init__(self, clip_norm: float, accountant: Accountant | None = None) -> None:
        self.clip_norm = clip_norm
        self.norm: float | None = None
        self._accountant = accountant

    def protect(self, buckets: Sequence[Bucket], produce: Produce, share: Mapping[str, np.float32]) -> Produce:
        """What is to be sent instead of what ``produce`` gives; with noise, counted as sent.

        Args:
            buckets: all that travel in the round.
            produce: this cluster's update of a bucket as a fresh vector, the same numbers at each call; it is called
                once more for every bucket, for the norm.
            share: member -> its weight in the average.
        """
        self.norm = None
        if not buckets:
            return produce
        self.norm = math.sqrt(sum(_square(produce(bucket)) for bucket in buckets))
        factor = clip_factor(self.norm, self.clip_norm)
        noise = 0.0
        if self._accountant is not None:
            noise = self.clip_norm * self._accountant.own_multiplier
            self._accountant.spend(share)

        def protected(bucket: Bucket) -> Float32Vector:
            update = produce(bucket)
            if factor < 1:
                update *= factor
            if noise:
                # Never twice from one key, so a round that is repeated, or done again after a resume, has fresh noise.
                update += np.float32(noise) * normal(os.urandom(KEY_BYTES), len(update))
            return update

        return protected


def clip_factor(norm: float, bound: float) -> np.float32:
    """By what to multiply a float32 vector of this norm, so that the product's is at most ``bound``; 1 if it is already.

    Rounding the factor and the products could exceed the bound by 2^-23 of it, so the factor is that much smaller.
    """
    return np.float32(1 if norm <= bound else bound / norm * (1 - 2**-22))


def normal(key: bytes, count: int) -> Float32Vector:
    """``count`` standard normal numbers from the keystream of a key, by the method of Box and Muller (1958)."""
    pairs = -(-count // 2)
    bits = keystream(key, 16 * pairs).view(np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[0] + np.uint64(1)) * 2.0**-53)).astype(np.float32)
    angle = (bits[1] * (2 * np.pi * 2.0**-53)).astype(np.float32)
    numbers: Float32Vector = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return numbers[:count]


def _square(update: Float32Vector) -> float:
    wide = update.astype(np.float64)
    return float(wide @ wide)
