"""NebulaCallback without a Trainer: two members as threads, and what a Trainer on a GPU would do with a scaler.

fp16 does not run on CPU, so a stand-in plays the loss scaler: it skips a step whose gradients are not
finite and halves its scale, as ``paddle.amp.GradScaler`` does.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import TrainerCallback, TrainingArguments
from paddlenlp.trainer.trainer_callback import TrainerControl, TrainerState

from paddlenlp_nebula import NebulaArguments, NebulaCallback
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.ledger.ledger import Ledger
from tests.adapters.models import lora

pytestmark = pytest.mark.timeout(60)


class StandInScaler:
    """Scales gradients by ``scale``; `step` unscales, or skips and halves."""

    def __init__(self, scale: float) -> None:
        self._scale = paddle.to_tensor([scale])
        self.skipped = 0

    def step(self, model: paddle.nn.Layer) -> None:
        scale = float(self._scale)
        if not all(bool(paddle.isfinite(p.grad).all()) for p in model.parameters()):
            self.skipped += 1
            self._scale = paddle.to_tensor([scale / 2])
            return
        for p in model.parameters():
            p.set_value(p.detach() - 0.5 * p.grad / scale)


class Member:
    """One cluster: a tiny model and the callback, driven by hand."""

    def __init__(self, cluster: str, folder: str, **settings) -> None:
        self.cluster = cluster
        self.model = paddle.nn.Linear(3, 1)
        self.args = TrainingArguments(output_dir=f"{folder}/{cluster}", device="cpu", report_to=[], max_steps=9)
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.max_steps = 9
        nebula = NebulaArguments(
            cluster=cluster, rendezvous="loopback", **{"clusters": "west,east", "sync_timeout_s": 20, **settings}
        )
        self.callback = NebulaCallback(nebula)

    def event(self, name: str, **kwargs) -> None:
        kwargs = {"model": self.model, "optimizer": SimpleNamespace(), **kwargs}
        getattr(self.callback, name)(self.args, self.state, self.control, **kwargs)

    def update(self, gradient: float, scaler: StandInScaler | None = None, samples: int = 2) -> np.ndarray:
        """One optimizer step whose true gradient is constant; returns the gradients the optimizer sees."""
        self.event("on_load_data_end", inputs={"x": paddle.zeros([samples, 3])})
        self.event("on_step_begin")
        for p in self.model.parameters():
            p.grad = paddle.full(p.shape, gradient * (float(scaler._scale) if scaler else 1.0))
        self.event("on_optimizer_begin", scaler=scaler)
        seen = self.model.weight.grad.numpy().copy()
        if scaler:
            scaler.step(self.model)
        self.model.clear_gradients()
        self.event("on_optimizer_end", scaler=scaler)
        self.state.global_step += 1
        self.event("on_step_end")
        return seen


def together(*scripts) -> list:
    """Run one function per member, each in a thread; returns their results or raises the first error."""
    results: list = [None] * len(scripts)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = scripts[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def members(tmp_path):
    pair = [Member(cluster, str(tmp_path)) for cluster in ("west", "east")]
    together(*(lambda m=m: m.event("on_train_begin") for m in pair))
    yield pair
    together(*(lambda m=m: m.event("on_train_end") for m in pair))


def test_an_overflow_on_one_cluster_skips_the_step_on_both(members):
    west, east = members
    scalers = [StandInScaler(1024.0), StandInScaler(1024.0)]
    together(lambda: west.update(1.0, scalers[0]), lambda: east.update(3.0, scalers[1]))
    before = west.model.weight.numpy().copy()
    seen = together(lambda: west.update(float("inf"), scalers[0]), lambda: east.update(1.0, scalers[1]))
    assert all(np.isinf(gradient).all() for gradient in seen)
    assert [scaler.skipped for scaler in scalers] == [1, 1]
    assert [float(scaler._scale) for scaler in scalers] == [512.0, 512.0]
    assert (west.model.weight.numpy() == before).all()
    seen = together(lambda: west.update(1.0, scalers[0]), lambda: east.update(3.0, scalers[1]))
    assert [gradient.flat[0] for gradient in seen] == [2.0 * 512, 2.0 * 512]
    assert (west.model.weight.numpy() == east.model.weight.numpy()).all()
    assert (west.model.weight.numpy() != before).all()
    assert any("west" in s and "not finite" in s for s in east.callback.ledger.degradations)


def test_unequal_scales_give_the_same_true_gradient(members):
    west, east = members
    scalers = [StandInScaler(1024.0), StandInScaler(64.0)]
    seen = together(lambda: west.update(1.0, scalers[0]), lambda: east.update(3.0, scalers[1], samples=6))
    assert [gradient.flat[0] for gradient in seen] == [2.5 * 1024, 2.5 * 64]  # weighted by samples
    assert (west.model.weight.numpy() == east.model.weight.numpy()).all()


def test_a_scaler_that_is_switched_off_scales_nothing(members):
    """As Paddle's is on a CPU, where PaddleNLP 3.0.0b4 then fails by itself, without us as well."""
    west, _ = members
    off = paddle.amp.GradScaler(enable=False)
    for member in members:
        member.event("on_load_data_end", inputs={"x": paddle.zeros([2, 3])})
        member.event("on_step_begin")
        for p in member.model.parameters():
            p.grad = paddle.full(p.shape, 1.0 if member is west else 3.0)
    together(*(lambda m=m: m.event("on_optimizer_begin", scaler=off) for m in members))
    assert [m.model.weight.grad.numpy().flat[0] for m in members] == [2.0, 2.0]


def test_the_counters_are_in_the_trainer_state(members):
    west, east = members
    together(lambda: west.update(1.0), lambda: east.update(1.0, samples=5))
    saved = west.state.trial_params["nebula"]
    assert saved["exchanges"] == 1
    assert saved["ledger"]["samples"] == 2
    assert east.callback.ledger.samples == 5


def test_an_evaluation_is_an_exchange_that_the_next_checkpoint_knows_of(members):
    west, east = members
    together(lambda: west.update(1.0), lambda: east.update(1.0))
    exposed = west.callback.ledger.seconds_exposed
    metrics = [{"eval_loss": 1.0, "eval_runtime": 5.0}, {"eval_loss": 3.0, "eval_runtime": 7.0}]

    waiting = threading.Event()
    west.callback._run._link.on_wait = waiting.set

    def evaluate_late():
        waiting.wait(20)
        time.sleep(0.3)
        east.event("on_evaluate", metrics=metrics[1])

    together(lambda: west.event("on_evaluate", metrics=metrics[0]), evaluate_late)
    assert metrics == [{"eval_loss": 2.0, "eval_runtime": 5.0}, {"eval_loss": 2.0, "eval_runtime": 7.0}]
    saved = west.state.trial_params["nebula"]
    assert saved["exchanges"] == 2
    assert saved["ledger"]["bytes_by_kind"]["NOTE"][0] > 0
    assert west.callback.ledger.seconds_exposed >= exposed + 0.3


def test_a_cluster_that_is_lost_during_an_evaluation(members):
    west, east = members
    together(lambda: west.update(1.0), lambda: east.update(1.0))
    metrics = {"eval_loss": 1.0}
    together(
        lambda: west.event("on_evaluate", metrics=metrics), lambda: east.callback.fail("it failed with OSError: disk")
    )
    assert metrics == {"eval_loss": 1.0}
    assert west.callback.ledger.members == ("west",)
    before = west.callback.ledger.rounds
    assert west.update(5.0).flat[0] == 5.0
    assert west.callback.ledger.rounds == before


def test_a_run_that_did_not_come_about_changes_no_later_evaluation(tmp_path):
    west = Member("west", str(tmp_path), sync_timeout_s=0.2)
    with pytest.raises(NebulaError, match="east"):
        west.event("on_train_begin")
    metrics = {"eval_loss": 1.0}
    west.event("on_evaluate", metrics=metrics)
    assert metrics == {"eval_loss": 1.0}


def test_a_batch_without_names_counts_too(members):
    """As a Trainer with a ``compute_loss`` of its own may have it."""
    west, _ = members
    west.event("on_load_data_end", inputs=[paddle.ones([5, 3]), paddle.zeros([5])])
    first = west.callback._batch_hash
    assert west.callback._last_batch == (5, 0)
    west.callback._batch_hash = 0
    west.event("on_load_data_end", inputs=(paddle.zeros([5, 3]), paddle.zeros([5])))
    assert first != west.callback._batch_hash != 0
    west.event("on_load_data_end", inputs=paddle.zeros([7, 3]))
    assert west.callback._last_batch == (7, 0)


@pytest.mark.parametrize("other", [{"sync_strategy": "local_steps"}, {"sync_strategy": "every_step"}])
def test_a_merge_rule_that_one_lacks_is_an_error_on_both(tmp_path, other):
    """Who describes its LoRA ahead of the handshake meets one that does not."""
    west = Member("west", str(tmp_path), sync_strategy="local_steps", sync_lora_merge="product")
    pair = [west, Member("east", str(tmp_path), **other)]
    errors = []

    def begin(member):
        member.model = lora()
        try:
            member.event("on_train_begin")
        except NebulaError as error:
            errors.append(str(error))

    together(*(lambda member=member: begin(member) for member in pair))
    assert len(errors) == 2
    assert all("with the same settings (sync_strategy, sync_lora_merge)" in error for error in errors), errors


def test_tokens_that_weigh_must_be_there(tmp_path):
    west = Member("west", str(tmp_path), sync_weight="tokens")
    with pytest.raises(NebulaError, match=r"sync_weight='tokens' needs batches with input_ids .* got one with x: set"):
        west.event("on_load_data_end", inputs={"x": paddle.zeros([2, 3])})


def test_numbers_of_any_library_are_agreed_on(members):
    metrics = [
        {"eval_a": np.float32(1), "eval_b": paddle.to_tensor(3.0), "eval_c": "good", "eval_d": np.ones(2)},
        {"eval_a": 4, "eval_b": np.array([5.0]), "eval_c": "bad", "eval_d": np.zeros(2)},
    ]
    together(
        *(lambda m=m, own=own: m.event("on_evaluate", metrics=own) for m, own in zip(members, metrics, strict=True))
    )
    assert [(own["eval_a"], own["eval_b"], own["eval_c"]) for own in metrics] == [(2.5, 4.0, "good"), (2.5, 4.0, "bad")]


def test_a_metric_that_one_lacks_is_an_error_on_both(members):
    def refused(member, metrics):
        with pytest.raises(NebulaError) as caught:
            member.event("on_evaluate", metrics=metrics)
        return str(caught.value)

    west, east = members
    sentences = together(lambda: refused(west, {"eval_a": 1.0}), lambda: refused(east, {"eval_a": 1.0, "eval_b": 2.0}))
    assert sentences[0] == sentences[1]
    assert "must compute the metric 'eval_b'" in sentences[0]


def test_what_is_unfrozen_later_is_refused_with_its_name(tmp_path):
    pair = [Member(cluster, str(tmp_path), sync_on_loss="continue") for cluster in ("west", "east")]
    for member in pair:
        member.model.bias.stop_gradient = True
        member.model.bias.set_value(paddle.zeros([1]))
    together(*(lambda m=m: m.event("on_train_begin") for m in pair))
    for member in pair:
        member.model.bias.stop_gradient = False
        with pytest.raises(NebulaError, match="'bias' has a gradient but does not travel"):
            member.update(1.0)


def test_a_report_that_cannot_be_written_ends_no_training(members, monkeypatch):
    west, east = members

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Ledger, "write", full)
    for _ in range(2):
        together(*(lambda m=m: (m.update(1.0), m.event("on_log", logs={"loss": 1.0})) for m in (west, east)))
    for member in (west, east):
        told = [sentence for sentence in member.callback.ledger.degradations if "written" in sentence]
        assert len(told) == 1
        assert "nebula_report.json could not be written: No space left on device" in told[0]


def test_a_training_whose_report_cannot_be_written_does_not_begin(tmp_path):
    (tmp_path / "west").write_text("not a folder")
    lonely = Member("west", str(tmp_path))
    lonely.callback.nebula_args.clusters = "west"
    with pytest.raises(OSError, match="west"):
        lonely.event("on_train_begin")
    lonely.callback.fail("its folder is a file")


@pytest.mark.parametrize("damaged", [{}, {"ledger": 3, "exchanges": 1}, {"ledger": {}, "exchanges": "x"}, []])
def test_damaged_counters_of_a_checkpoint_are_named(tmp_path, damaged):
    callback = Member("west", str(tmp_path)).callback
    state = SimpleNamespace(global_step=3, trial_params={"nebula": damaged})
    with pytest.raises(NebulaError, match="the checkpoint of step 3 must hold this cluster's counters"):
        callback._restore(state)


def test_every_method_is_an_event_of_the_trainer():
    events = {name for name, _ in inspect.getmembers(TrainerCallback, inspect.isfunction) if name.startswith("on_")}
    mine = {name for name in vars(NebulaCallback) if name.startswith("on_")}
    assert mine <= events
    assert {"on_train_begin", "on_optimizer_begin", "on_optimizer_end", "on_train_end"} <= mine


def test_a_second_callback_is_refused(tmp_path):
    member = Member("west", str(tmp_path))
    member.callback.nebula_args.clusters = "west"
    member.event("on_train_begin")
    second = NebulaCallback(member.callback.nebula_args)
    with pytest.raises(ConfigurationError, match="takes one NebulaCallback, got two"):
        second.on_train_begin(member.args, member.state, member.control, model=member.model)
    member.event("on_train_end")


@pytest.mark.parametrize("setting", [{"sync_resume": "common"}, {"sync_data": "shard"}])
def test_what_only_nebula_trainer_can_do_is_refused(tmp_path, setting):
    with pytest.raises(ConfigurationError, match="NebulaTrainer"):
        Member("west", str(tmp_path), **setting).event("on_train_begin")


def test_a_shared_output_folder_is_refused(tmp_path):
    pair = [Member(cluster, str(tmp_path)) for cluster in ("west", "east")]
    pair[1].args.output_dir = pair[0].args.output_dir
    errors = []

    def begin(member):
        try:
            member.event("on_train_begin")
        except Exception as error:
            errors.append(str(error))
            member.callback.fail("the test is over")
            member.callback.close()

    together(*(lambda m=m: begin(m) for m in pair))
    assert errors[0] == errors[1]
    assert "output_dir" in errors[0]


def test_settings_without_effect_are_counted(tmp_path):
    pair = [
        Member("west", str(tmp_path), sync_every="5", sync_feedback_decay=0.9),
        Member("east", str(tmp_path), sync_every="5", sync_feedback_decay=0.9),
    ]
    together(*(lambda m=m: m.event("on_train_begin") for m in pair))
    together(*(lambda m=m: m.event("on_train_end") for m in pair))
    for member in pair:
        report = json.loads((tmp_path / member.cluster / "nebula_report.json").read_text())
        assert [sentence.split()[0] for sentence in report["degradations"]] == [
            "sync_every=5",
            "sync_feedback_decay=0.9",
        ]


@pytest.mark.parametrize(("every_s", "steps"), [(0.0, 1), (60.0, 0)])
def test_the_report_follows_a_training_that_rarely_logs(members, tmp_path, monkeypatch, every_s, steps):
    monkeypatch.setattr("paddlenlp_nebula.callback._REPORT_EVERY_S", every_s)
    together(*(lambda m=m: m.update(1.0) for m in members))
    assert json.loads((tmp_path / "west" / "nebula_report.json").read_text())["steps"] == steps


@pytest.mark.parametrize(
    ("name", "said", "lost"),
    [("checkpoint-1", str, False), ("checkpoint-2", str, True), ("checkpoint-1", bool, True)],
)
def test_what_was_not_sent_is_found_where_the_training_arguments_say(tmp_path, name, said, lost):
    """Resumed into another output_dir; the folder of another step is none of this checkpoint's."""
    settings = {"clusters": "west", "sync_strategy": "local_steps", "sync_every": "4", "sync_codec": "topk:1/2,1bit"}
    saved = tmp_path / "old" / name
    first = Member("west", str(tmp_path / "first"), **settings)
    first.event("on_train_begin")
    first.update(1.0)
    (tmp_path / "first" / "west" / "checkpoint-1").mkdir()
    first.event("on_save")
    saved.parent.mkdir()
    (tmp_path / "first" / "west" / "checkpoint-1").rename(saved)

    second = Member("west", str(tmp_path / "second"), **settings)
    second.state.global_step, second.state.trial_params = 1, first.state.trial_params
    second.args.resume_from_checkpoint = said(saved)
    second.event("on_train_begin")
    assert any("holds no nebula_state" in sentence for sentence in second.callback.ledger.degradations) == lost
    for member in (first, second):
        member.callback.close()
