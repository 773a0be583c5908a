"""Full precision where it matters: a Trainer computes losses under mixed precision, which would undo our casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import paddle

__all__ = ["full_precision"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def full_precision(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let no automatic mixed precision change the dtypes of what a function computes with."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with paddle.amp.auto_cast(enable=False):
            return function(*args, **kwargs)

    return guarded
