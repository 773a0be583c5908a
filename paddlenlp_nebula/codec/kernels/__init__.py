"""Loops over elements, compiled by numba.

Importing a module of this folder compiles its kernels for this processor, or loads them from numba's
cache: seconds, or a tenth of one. So codecs import them when they are first needed, in ``init`` at the
latest. Rules: one explicit signature per kernel; the functions it calls in the same module (the cache
notices changes in that file only); no ``fastmath``, so that every processor computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types

__all__ = ["FLOATS", "FLOATS_IN", "OCTETS", "OCTETS_IN", "kernel"]

FLOATS = types.Array(types.float32, 1, "C")
OCTETS = types.Array(types.uint8, 1, "C")
# What is only read may lie anywhere, in a received message for example.
FLOATS_IN = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
OCTETS_IN = types.Array(types.uint8, 1, "C", readonly=True, aligned=False)


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function for one signature; it runs without the GIL.

    numba keeps the result beside the module, or in the user's cache folder where that cannot be
    written. Where neither can, it is compiled anew in every process.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
        except (RuntimeError, OSError) as error:  # no folder to write to; a full disk
            if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
                raise
            return numba.njit(signature, nogil=True)(function)  # type: ignore[no-any-return]

    return compiled
