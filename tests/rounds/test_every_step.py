"""What a checkpoint must not be continued with, and what of the optimizer a cluster that comes back takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.rounds.comeback import optimizer_state
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


def test_moments_of_master_weights_are_taken_over() -> None:
    """Paddle's own optimizer makes them, as it does for bfloat16 parameters on a GPU."""
    layer = paddle.nn.Linear(3, 2)
    layer.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), multi_precision=True)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), layer.parameters())
    states = optimizer_state(optimizer, layer.parameters())
    assert [name for name in states.names if name.startswith("moment1")] == ["moment1.0", "moment1.1"]
    assert len(states) == 2 * 4  # two moments, and the powers of two betas
    assert states.parameters[0] is optimizer._get_accumulator_master("beta1_pow_acc", layer.weight)
