"""Reports as JSON that every reader takes: RFC 8259 (section 6) knows no infinity and no NaN, Python's writer does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["NOT_FINITE", "json_text"]

NOT_FINITE = "not_finite"
"""The key under which a report says what its nulls were, such as {"metrics.eval_ppl": "inf"}; absent if there is nothing."""


def json_text(report: Mapping[str, Any]) -> str:
    """A report's text, in which numbers that are not finite are null and listed under `NOT_FINITE`."""
    found: dict[str, str] = {}
    content = _finite(report, "", found)
    if found:
        content[NOT_FINITE] = found
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _finite(value: Any, path: str, found: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{path}.{key}".lstrip("."), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{path}.{number}", found) for number, item in enumerate(value)]
    return value
