"""Several processes in a cluster: what would exchange wrong gradients is refused, all of it at once."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.hybrid import complete_gradients, refuse_unsupported
from paddlenlp_nebula.tensors import set_gradient


class Stage(Enum):
    """As PaddleNLP's ShardingOption."""

    ONE = "stage1"
    TWO = "stage2"
    THREE = "stage3"
    OFFLOAD = "offload"


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {
        "world_size": 2,
        "tensor_parallel_degree": -1,
        "pipeline_parallel_degree": -1,
        "sep_parallel_degree": -1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "use_expert_parallel": False,
        "sharding": [],
        "sharding_parallel_degree": -1,
        "sharding_parallel_config": "",
        "fp16": False,
    }
    return SimpleNamespace(**{**fields, **changes})


STAGE1 = {"sharding": [Stage.ONE]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fp16": True},
        {"world_size": 1, "sharding": [Stage.THREE]},  # PaddleNLP itself ignores it
        {"sharding": None},
        STAGE1,
        {**STAGE1, "sharding_parallel_degree": 2},
        {"sharding": ["stage1"]},
        {"tensor_parallel_degree": 1},
    ],
)
def test_what_is_supported(changes: dict[str, Any]) -> None:
    refuse_unsupported(arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tensor_parallel_degree": 2},
            "tensor parallelism inside a cluster .* tensor_parallel_degree must be 1, got 2",
        ),
        ({"pipeline_parallel_degree": 4}, "pipeline parallelism inside a cluster"),
        ({"sep_parallel_degree": 2}, r"sequence \(sep\) parallelism inside a cluster"),
        ({"context_parallel_degree": 2}, "context parallelism inside a cluster"),
        ({"expert_parallel_degree": 2}, "expert parallelism inside a cluster"),
        ({"use_expert_parallel": True}, "unset use_expert_parallel"),
        ({"sharding": [Stage.TWO]}, "sharding='stage2' inside a cluster is not supported"),
        ({"sharding": [Stage.THREE]}, "sharding='stage3' inside a cluster is not supported"),
        ({"sharding": [Stage.ONE, Stage.OFFLOAD]}, "sharding='offload' inside a cluster"),
        (
            {**STAGE1, "sharding_parallel_config": "split_param"},
            "sharding_parallel_config='split_param' keeps gradients",
        ),
        ({**STAGE1, "sharding_parallel_config": "a enable_stage1_overlap"}, "'enable_stage1_overlap' keeps gradients"),
        ({**STAGE1, "sharding_parallel_degree": 4, "world_size": 8}, r"the number of processes \(8\) .* got 4"),
        ({**STAGE1, "fp16": True}, "fp16 with sharding='stage1' reduces gradients too late"),
    ],
)
def test_what_is_not(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as wrong:
        refuse_unsupported(arguments(**changes))
    assert len(wrong.value.problems) == 1


def test_all_refusals_at_once() -> None:
    with pytest.raises(ConfigurationError) as wrong:
        refuse_unsupported(arguments(tensor_parallel_degree=2, pipeline_parallel_degree=2, sharding=[Stage.TWO]))
    assert len(wrong.value.problems) == 3


class Local:
    """Two processes, of which this is the first; notes what is broadcast."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.broadcasts: list[tuple[list[float], int]] = []

    def broadcast_tensor(self, tensor: Any, source: int) -> None:
        self.broadcasts.append((tensor.flatten().tolist(), source))


class Sharded:
    def __init__(self, owned: dict[int, list[Any]]) -> None:
        self._rank2params = owned


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self._inner_opt = inner


def test_owners_pass_on_their_gradients() -> None:
    first, second = (paddle.create_parameter([2], "float32") for _ in range(2))
    set_gradient(first, np.array([1, 2], dtype=np.float32))
    local = Local()
    complete_gradients(Wrapped(Wrapped(Sharded({1: [second], 0: [first]}))), local)  # type: ignore[arg-type]
    assert local.broadcasts == [([1, 2], 0), ([0, 0], 1)]


@pytest.mark.parametrize(("size", "optimizer"), [(1, Sharded({0: []})), (2, Wrapped(SimpleNamespace()))])
def test_data_parallel_gradients_are_complete_already(size: int, optimizer: Any) -> None:
    local = Local(size)
    complete_gradients(optimizer, local)  # type: ignore[arg-type]
    assert local.broadcasts == []
