"""A hash of some merged factors: a program for other processes, a function for this one."""

from __future__ import annotations

import hashlib

import numpy as np

from paddlenlp_nebula.adapters.merge import Factors, merge_products


def digest() -> str:
    rng = np.random.default_rng(7)
    members = []
    for rank in (4, 8, 16, 5):
        a, b = rng.standard_normal((300, rank), dtype=np.float32), rng.standard_normal((rank, 200), dtype=np.float32)
        members.append(Factors(a, b, 8 / rank))
    digest = hashlib.sha256()
    for rank in (4, 16, 40):
        for part in merge_products(members, [0.1, 0.2, 0.3, 0.4], rank, 0.5):
            digest.update(part.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(digest())
