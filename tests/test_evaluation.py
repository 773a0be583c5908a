"""What local steps cannot agree on is refused, all of it at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.evaluation import forget_best, refuse_what_cannot_agree, why_not_again
from paddlenlp_nebula.hello import hello


def training(**changes: Any) -> SimpleNamespace:
    fields = {
        "evaluation_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 60,
        "load_best_model_at_end": True,
    }
    return SimpleNamespace(**{**fields, **changes})


def settings(**changes: Any) -> NebulaArguments:
    fields = {"cluster": "west", "clusters": "west,east", "rendezvous": "loopback", "sync_strategy": "local_steps"}
    return NebulaArguments(**{**fields, "sync_every": "30", **changes})


@pytest.mark.parametrize(
    ("args", "nebula"),
    [
        (training(), settings()),
        (training(save_steps=45), settings(sync_strategy="every_step")),
        (training(save_steps=45), settings(clusters="west")),
        (training(save_steps=45, load_best_model_at_end=False), settings()),
        (training(load_best_model_at_end=False), settings(sync_every="2..30", sync_fragments=1)),
        (training(evaluation_strategy="no", load_best_model_at_end=False), settings(sync_every="auto-balance")),
    ],
)
def test_what_all_clusters_agree_on_is_let_through(args: SimpleNamespace, nebula: NebulaArguments) -> None:
    refuse_what_cannot_agree(args, nebula)


@pytest.mark.parametrize(
    ("args", "nebula", "words"),
    [
        (training(save_steps=45), settings(), [r"save_steps must be a multiple of sync_every \(30\), got 45"]),
        (training(), settings(sync_every="2..30"), [r"sync_every must be a fixed number of steps, got '2\.\.30'"]),
        (training(save_strategy="epoch"), settings(), ["save_strategy must be 'steps', .* got 'epoch'"]),
        (
            training(save_steps=45),
            settings(sync_fragments=2, sync_keep_unsent=True, sync_codec="int8"),
            ["save_steps must be", "sync_fragments must be 1, got 2", "sync_keep_unsent must be false"],
        ),
        (
            training(load_best_model_at_end=False),
            settings(sync_every="auto-balance:8"),
            ["evaluation_strategy must be 'no' with sync_every='auto-balance:8', got 'steps'"],
        ),
    ],
)
def test_the_rest_is_refused(args: SimpleNamespace, nebula: NebulaArguments, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        refuse_what_cannot_agree(args, nebula)
    assert len(caught.value.problems) == len(words)
    for sentence in words:
        assert caught.match(sentence)


def test_clusters_that_were_apart_look_for_the_best_model_anew() -> None:
    state = SimpleNamespace(best_metric=0.5, best_model_checkpoint="runs/checkpoint-60")
    assert "runs/checkpoint-60 is no longer the best model" in str(forget_best(state))
    assert (state.best_metric, state.best_model_checkpoint) == (None, None)
    assert forget_best(state) is None


@pytest.mark.parametrize(("strategy", "refused"), [("no", False), ("steps", False), ("epoch", True)])
@pytest.mark.parametrize("loader", [None, [0] * 10])
def test_epochs_end_at_unlike_steps_after_a_return(strategy: str, refused: bool, loader: Any) -> None:
    names = ("fp16", "bf16", "amp_master_grad", "optim", "lr_scheduler_type")
    args: Any = SimpleNamespace(
        **dict.fromkeys(names),
        evaluation_strategy=strategy,
        eval_steps=5,
        gradient_accumulation_steps=2,
        output_dir="a",
    )
    state = SimpleNamespace(global_step=0, max_steps=9)
    evaluation = hello(args, state, settings(), loader, None)["evaluation"]
    assert (why_not_again(evaluation) is not None) == refused
