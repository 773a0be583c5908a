"""Goodput is counted in the time that both runs share."""

from __future__ import annotations

import pytest

from tests.chaos.goodput import goodput


def test_goodput() -> None:
    undisturbed = [(float(second), 10 * second) for second in range(100, 201)]
    away = [(float(second), 10 * (second if second < 140 else max(140, second - 10))) for second in range(102, 215)]
    share, seconds = goodput(away, undisturbed)
    assert seconds == 98
    assert share == pytest.approx(88 / 98)
    assert goodput(undisturbed, undisturbed) == (1.0, 100.0)
