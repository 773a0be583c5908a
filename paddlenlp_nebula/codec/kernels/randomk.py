"""Which elements random-k takes, in integers only: the same on all hardware."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.codec.kernels import kernel

__all__ = ["choose"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@kernel("void(u8, u8, i8[::1])")
def choose(seed: np.uint64, numel: np.uint64, out: npt.NDArray[np.int64]) -> None:
    """One random element out of each of len(out) strata of equal size, or sizes one apart.

    The strata start at a random element and go round, so that each element has the same chance,
    len(out) / numel. The random numbers are those of SplitMix64 (Steele, Lea, Flood 2014, "Fast
    splittable pseudorandom number generators", figure 13), mapped to a stratum by multiplication.

    Args:
        seed: of the generator.
        numel: elements to choose from, below 2^32.
        out: receives the places of the chosen ones, all different; 1 <= len(out) <= numel.
    """
    count = np.uint64(len(out))
    size, rest = numel // count, numel % count
    left_over = np.uint64(0)
    start = np.uint64(0)
    for i in range(-1, len(out)):
        seed += _STEP
        word = seed
        word = (word ^ (word >> _30)) * _FIRST
        word = (word ^ (word >> _27)) * _SECOND
        word = (word ^ (word >> _31)) >> _32
        if i < 0:
            start = word * numel >> _32
            continue
        left_over += rest
        stratum = size
        if left_over >= count:
            left_over -= count
            stratum += np.uint64(1)
        place = start + (word * stratum >> _32)
        if place >= numel:
            place -= numel
        out[i] = np.int64(place)
        start += stratum
