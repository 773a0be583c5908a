"""What a run does about privacy before a round begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import paddle
import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.privacy.choose import accountant_for, protection_for
from paddlenlp_nebula.rounds import comeback
from paddlenlp_nebula.rounds.base import Step
from paddlenlp_nebula.rounds.every_step import EveryStepRounds
from paddlenlp_nebula.rounds.local_steps import LocalStepsRounds
from paddlenlp_nebula.selection import Selection

THREE = {"cluster": "west", "clusters": "west,east,north", "rendezvous": "loopback"}
NOISE = {"privacy_clip_norm": 2.0, "privacy_noise_multiplier": 3.0, "sync_weight": "equal", "sync_quorum": 3}
SECURE = {"privacy_secure_aggregation": True, "sync_quorum": 3}


class _Gpu:
    def is_cpu_place(self) -> bool:
        return False

    def __str__(self) -> str:
        return "Place(gpu:0)"


def made(kind: type, place: object, **settings: object):
    from paddlenlp_nebula.ledger.ledger import Ledger

    arguments = NebulaArguments(**THREE, **settings)
    ledger = Ledger(privacy=accountant_for(arguments))
    run = SimpleNamespace(
        arguments=arguments, ledger=ledger, alone=False, degrade=lambda said, once: ledger.degrade(said)
    )
    return kind(
        run, Selection([("w", SimpleNamespace(shape=[8, 8], dtype=paddle.float32, place=place))]), None, 10
    ), ledger


@pytest.mark.parametrize("settings", [NOISE, SECURE, {"privacy_clip_norm": 1.0}])
@pytest.mark.parametrize(("kind", "strategy"), [(EveryStepRounds, "every_step"), (LocalStepsRounds, "local_steps")])
def test_the_host_is_taken_and_named_where_parameters_are_on_a_device(settings, kind, strategy) -> None:
    _, ledger = made(kind, _Gpu(), sync_strategy=strategy, **settings)
    assert ledger.facts["backend"] == "host"
    (said,) = ledger.degradations
    assert said.endswith("privacy draws and adds its random numbers on the host")


@pytest.mark.parametrize("settings", [NOISE, SECURE, {}])
def test_the_report_says_what_is_on(settings) -> None:
    _, ledger = made(EveryStepRounds, paddle.CPUPlace(), **settings)
    found = {name: value for name, value in ledger.report().items() if name.startswith("privacy_")}
    wanted = {name: value for name, value in settings.items() if name.startswith("privacy_")}
    if "privacy_noise_multiplier" in settings:
        wanted |= {"privacy_epsilon": 0.0, "privacy_epsilon_members": 0.0, "privacy_delta": 1e-5, "privacy_rounds": 0}
    assert found == wanted


def test_a_loss_scale_is_refused_with_noise() -> None:
    rounds, _ = made(EveryStepRounds, paddle.CPUPlace(), **NOISE)
    with pytest.raises(NebulaError, match=r"needs gradients without a loss scale.*use bf16"):
        rounds.before_step(Step(1, 4, 4, scaled=True))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [(NOISE, 0), (SECURE, 0), ({"privacy_clip_norm": 1.0}, 0), ({"sync_staleness_limit": 7}, 7)],
)
def test_what_a_cluster_that_comes_back_has_learned_alone_is_not_merged(settings, limit, monkeypatch) -> None:
    """Its parameters would travel as they are."""

    class Stop(Exception):
        pass

    def reunion(link, history, staleness_limit):
        raise Stop(staleness_limit)

    monkeypatch.setattr(comeback, "Reunion", reunion)
    party = SimpleNamespace(link=SimpleNamespace(peers=("east",)), returns=Mock(), number=3)
    run: Any = SimpleNamespace(arguments=NebulaArguments(**THREE, **settings), party=party)
    with pytest.raises(Stop) as stop:
        comeback.Comeback(run).meet("north", 5, {}, Mock(**{"exchange.diverged": False}), None)
    assert stop.value.args == (limit,)


@pytest.mark.parametrize(("settings", "wanted"), [(NOISE, None), (SECURE, None), ({}, "east")])
def test_a_cluster_that_is_alone_gives_its_parameters_to_nobody(settings, wanted) -> None:
    returns = Mock(**{"invitation.return_value": None})
    party = SimpleNamespace(link=SimpleNamespace(peers=()), returns=returns, candidates=lambda: ("east",))
    run: Any = SimpleNamespace(arguments=NebulaArguments(**THREE, **settings), party=party, ended=None, number=3)
    assert comeback.Comeback(run).due() == wanted


def test_a_bound_and_its_noise_fit_into_32_bits() -> None:
    arguments = NebulaArguments(**THREE, **NOISE, privacy_secure_aggregation=True)
    secure = protection_for(arguments, accountant_for(arguments), ["w"]).secure
    assert secure is not None
    assert secure._fixed_point.bits == 32
    assert secure._fixed_point.limit >= 2.0 + 8.57 * 2.0 * 3.0 / 3**0.5
    arguments = NebulaArguments(**THREE, **SECURE)
    secure = protection_for(arguments, None, ["w"]).secure
    assert secure is not None
    assert secure._fixed_point.bits == 64
