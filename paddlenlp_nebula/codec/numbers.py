"""Numbers in the spec of a codec: plain ASCII, so that one number has few ways to be written and no surprising ones."""

from __future__ import annotations

import re

__all__ = ["decimal", "spelled", "whole"]

_WHOLE = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]*\.?[0-9]*(e[-+]?[0-9]+)?|inf")


def whole(text: str) -> int:
    """A whole number of at most nine digits; -1, which is in no range, where it is none."""
    return int(text) if _WHOLE.fullmatch(text) else -1


def decimal(text: str) -> float:
    """A number that is not negative; NaN, which is in no range, where it is none.

    Python's ``float`` takes more: white space, underscores, the digits of other scripts.
    """
    try:
        return float(text) if _DECIMAL.fullmatch(text) else float("nan")
    except ValueError:  # no digits
        return float("nan")


def spelled(number: float) -> str:
    """The shortest text that ``decimal`` reads as this number, without ``+``, which separates codecs."""
    return repr(number).removesuffix(".0").replace("e+", "e")
