"""A hash of some merged factors: a program for other processes, a function for this one.

The factors' rounding to float32 hides most differences, so what goes before it is hashed too.
"""

from __future__ import annotations

import hashlib

import numpy as np

from paddlenlp_nebula.adapters import merge


def digest() -> str:
    rng = np.random.default_rng(7)
    members = []
    for rank in (4, 8, 16, 5):
        a, b = rng.standard_normal((300, rank), dtype=np.float32), rng.standard_normal((rank, 200), dtype=np.float32)
        members.append(merge.Factors(a, b, 8 / rank))
    left = np.concatenate([member.a for member in members], axis=1)
    right = np.ascontiguousarray(np.concatenate([member.b for member in members]).T)
    results = [*merge._decompose(merge.gram(left), merge.gram(right), np.linspace(0.1, 2, 33), 20)]
    for rank in (4, 16, 40):
        results += merge.merge_products(members, [0.1, 0.2, 0.3, 0.4], rank, 0.5)
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()


if __name__ == "__main__":
    print(digest())
