"""Which backend a run takes, and what its report says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.backend.device import DeviceBackend
from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.rounds.base import Rounds
from paddlenlp_nebula.rounds.every_step import EveryStepRounds
from paddlenlp_nebula.rounds.local_steps import LocalStepsRounds
from paddlenlp_nebula.rounds.lora_product import LoraProductRounds
from paddlenlp_nebula.selection import Selection


class _Gpu:
    def is_cpu_place(self) -> bool:
        return False

    def __str__(self) -> str:
        return "Place(gpu:0)"


def made(kind: type[Rounds], place: Any, **settings: Any) -> tuple[Rounds, Ledger]:
    """Rounds for parameters that lie somewhere, not begun yet."""
    arguments = NebulaArguments("west", "west", "loopback", **settings)
    ledger = Ledger()
    run: Any = SimpleNamespace(
        arguments=arguments, ledger=ledger, degrade=lambda sentence, once: ledger.degrade(sentence)
    )
    parameter = SimpleNamespace(shape=[8, 8], dtype=paddle.float32, place=place)
    return kind(run, Selection([("weight", parameter)]), None, 10), ledger


class ProductLike(LocalStepsRounds):
    """As `LoraProductRounds`, without a model that has LoRA."""

    only_host = LoraProductRounds.only_host


LOCAL = {"sync_strategy": "local_steps"}


@pytest.mark.parametrize(("kind", "settings"), [(EveryStepRounds, {}), (LocalStepsRounds, LOCAL)])
@pytest.mark.parametrize(
    ("backend", "place", "wanted"),
    [
        ("auto", paddle.CPUPlace(), "host"),
        ("auto", _Gpu(), "device"),
        ("host", _Gpu(), "host"),
        ("device", paddle.CPUPlace(), "device"),
    ],
)
def test_the_report_names_the_backend(kind: Any, settings: Any, backend: str, place: Any, wanted: str) -> None:
    rounds, ledger = made(kind, place, sync_backend=backend, **settings)
    assert isinstance(rounds._backend, DeviceBackend) == (wanted == "device")
    assert ledger.report()["backend"] == wanted
    assert ledger.degradations == []


def test_products_of_parameters_on_a_device_are_merged_on_the_host_and_the_report_says_so() -> None:
    rounds, ledger = made(ProductLike, _Gpu(), **LOCAL)
    assert rounds._backend is HOST
    assert ledger.report()["backend"] == "host"
    assert ledger.degradations == [
        "sync_backend='auto' takes the host although parameters lie on a device (Place(gpu:0)): sync_lora_merge='product' "
        "factors the products on the host"
    ]
    with pytest.raises(ConfigurationError, match="must be 'auto' or 'host' where sync_lora_merge='product' factors"):
        made(ProductLike, _Gpu(), sync_backend="device", **LOCAL)
