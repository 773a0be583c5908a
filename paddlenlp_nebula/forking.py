"""Forked data workers inherit the leader's sockets and would keep them open after its death."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["close_in_children"]


class _Closable(Protocol):
    def close_in_child(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
_hooked = False


def close_in_children(thing: _Closable) -> None:
    """Have ``thing.close_in_child()`` called in every process forked from now on, as long as it lives."""
    global _hooked
    if not _hooked:  # not at import time: importing the package changes nothing
        os.register_at_fork(after_in_child=_close_all)
        _hooked = True
    _open.add(thing)


def _close_all() -> None:
    for thing in list(_open):
        thing.close_in_child()
