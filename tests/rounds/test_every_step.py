"""What a checkpoint must not be continued with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.rounds.every_step import EveryStepRounds


def test_what_changes_of_parameters_left_is_not_added_to_gradients() -> None:
    rounds: Any = EveryStepRounds.__new__(EveryStepRounds)
    taken: list[dict[str, Any]] = []
    rounds._leader = SimpleNamespace(exchange=SimpleNamespace(restore=taken.append))
    residual = {"codec/0/residual": np.ones(4, dtype=np.float32)}
    with pytest.raises(NebulaError, match="'counters' of 'local_steps': resume with the strategy"):
        rounds.restore({**residual, "counters": np.zeros(5)})
    assert taken == []
    rounds.restore(residual)
    assert taken == [residual]
