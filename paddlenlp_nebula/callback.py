"""NebulaCallback: the Trainer's events, turned into calls on the run. It writes gradients.

docs/architecture.md shows the Trainer's loop with these events in place.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddlenlp.trainer import TrainerCallback
from paddlenlp.utils.log import logger

from paddlenlp_nebula.adapters.lora import freeze_a
from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.batches import count, hash_batch
from paddlenlp_nebula.checkpoint import find_state, save_state
from paddlenlp_nebula.doubts import doubts
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.evaluation import comparable, refuse_what_cannot_agree
from paddlenlp_nebula.farewell import TERMINATED, FarewellHook
from paddlenlp_nebula.hello import hello, part_random_state
from paddlenlp_nebula.hybrid import refuse_unsupported
from paddlenlp_nebula.jump import follow
from paddlenlp_nebula.ledger.ledger import REPORT_NAME, Ledger
from paddlenlp_nebula.privacy.choose import JOURNAL_NAME, accountant_for
from paddlenlp_nebula.rounds.base import Rounds, Step
from paddlenlp_nebula.rounds.choose import rounds_for
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import select
from paddlenlp_nebula.tensors import Tensor, gradient, numel
from paddlenlp_nebula.void_step import VoidStep

__all__ = ["NebulaCallback"]

_STATE_KEY = "nebula"  # in TrainerState.trial_params, which the Trainer saves and restores for us
_REPORT_EVERY_S = 10.0  # at least, however rarely the Trainer logs


class NebulaCallback(TrainerCallback):
    """Makes an ordinary PaddleNLP Trainer train together with those of other clusters.

    Put it in front of ``EarlyStoppingCallback``: it replaces each evaluation's metrics by the ones
    that the clusters agree on. `NebulaTrainer` sees to that, and to more.

    Args:
        nebula_args: the settings; by default all from the environment (``nebula launch``).

    Raises:
        ConfigurationError: the settings are incomplete or wrong.

    Example:
        >>> from paddlenlp_nebula import NebulaArguments, NebulaCallback
        >>> solo = NebulaArguments(cluster="west", clusters="west", rendezvous="loopback")
        >>> callback = NebulaCallback(solo)  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, nebula_args: NebulaArguments | None = None) -> None:
        self.nebula_args = nebula_args or NebulaArguments()
        self.ledger = Ledger()
        self.resume_folder: str | None = None  # the checkpoint, where somebody knows better than args.output_dir
        self.on_skip: Callable[[int], None] | None = None  # what knows the Trainer, and so can correct its losses
        self._run: Run | None = None
        self._rounds: Rounds | None = None
        self._step = Step(0, 0, 0)
        self._void: VoidStep | None = None  # the step under way, if the others ended training before it
        self._hook: FarewellHook | None = None
        self._report_path: Path | None = None  # once there is something to report
        self._selected: list[Tensor] = []
        self._staying: list[tuple[str, Tensor]] = []  # parameters that do not travel
        self._reports = 0  # written so far
        self._reported_at = 0.0
        self._samples = self._tokens = 0
        self._last_batch = (0, 0)
        self._batch_hash = 0
        self._step_started: float | None = None
        self._step_ended: float | None = None  # the one before: a step lasts from there, its data included
        self._exposed_before = 0.0
        self._saves = False  # the Trainer writes checkpoints
        self._terminated = False  # this process has been asked to end
        self._leaves = False  # one of this cluster's has, and its checkpoint is next

    def join(self) -> Run:
        """Meet the other clusters (done in ``on_train_begin`` unless it has been done before)."""
        self.ledger = Ledger(privacy=accountant_for(self.nebula_args))
        run = Run(self.nebula_args, self.ledger)
        run.join()
        self._run = run
        return run

    # Trainer events, in the order of the loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Meet, compare what is to be trained, make the selected parameters equal."""
        refuse_unsupported(args)
        refuse_what_cannot_agree(args, self.nebula_args)
        if vars(control).setdefault("nebula_callback", self) is not self:  # a Trainer has one control for all callbacks
            raise ConfigurationError(["a Trainer takes one NebulaCallback, got two: a NebulaTrainer brings its own"])
        model, nebula = kwargs["model"], self.nebula_args
        if self._hook is not None:  # an earlier training raised, and somebody caught it
            self.fail("it started training anew")
            self.close()
        if self._run is None:
            self._refuse_what_needs_nebula_trainer()
            self.join()
            # NebulaTrainer has joined, and watches, by itself.
            self._hook = FarewellHook(self.fail, self.checkpoint_first)
        run = self._run
        assert run is not None
        if nebula.sync_lora_merge == "freeze_a":
            freeze_a(model)
        selection = select(model, nebula.sync_parameters)
        self._selected = selection.parameters
        travelling = {id(parameter) for parameter in selection.parameters}
        self._staying = [(name, p) for name, p in model.named_parameters() if id(p) not in travelling]
        saved = self._restore(state)
        if run.local.is_leader:
            for sentence in doubts(nebula):
                run.degrade(sentence, once=True)
            if (privacy := self.ledger.privacy) is not None:
                journal = Path(args.output_dir) / JOURNAL_NAME
                if uncounted := privacy.keep_journal(journal, resumed=state.global_step > 0):
                    run.degrade(uncounted, once=True)
        self.ledger.facts = {
            "cluster": nebula.cluster,
            "clusters": list(nebula.cluster_names),
            "strategy": nebula.sync_strategy,
            "codec": nebula.sync_codec,
            "sync_every": nebula.sync_every if nebula.sync_strategy == "local_steps" else 1,
            "security": nebula.sync_security,
            "parameters_selected": selection.numel,
            "parameters_total": sum(numel(parameter) for parameter in model.parameters()),
            "max_steps": state.max_steps,
        }
        fields = hello(args, state, nebula, kwargs.get("train_dataloader"), kwargs.get("lr_scheduler"))
        self._rounds = rounds_for(run, selection, kwargs["optimizer"], state.max_steps, model)
        if history := (state.trial_params or {}).get(_STATE_KEY, {}).get("history") if saved else None:
            self._rounds.comeback.history.restore(history)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        named = str(args.resume_from_checkpoint)  # by custom what the Trainer was given, which it does not say
        candidates = [self.resume_folder, named if Path(named).name == folder.name else None, folder]
        found = find_state(candidates) if state.global_step else None
        self._rounds.prepare(model, fields, step=state.global_step, number=saved, state=found)
        if state.global_step == 0:  # a checkpoint has its own random state
            part_random_state(nebula.cluster_index)
        self._batch_hash = 0
        self._saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        self._step_ended = None
        self._report_path = Path(args.output_dir) / REPORT_NAME
        self._write_report()

    def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
        """Count what the next gradients are made of."""
        self._last_batch = count(inputs, weighs_tokens=self.nebula_args.sync_weight == "tokens")
        self._samples += self._last_batch[0]
        self._tokens += self._last_batch[1]
        if self.ledger.steps == 0 and self._batch_hash == 0 and not self.nebula_args.hides_updates:
            self._batch_hash = hash_batch(inputs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A fresh accumulation: batches that were only skipped after a resume do not count."""
        self._samples, self._tokens = self._last_batch
        self._step_started = time.perf_counter()
        self._exposed_before = self.ledger.seconds_exposed

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, scaler: Any = None, **kwargs: Any) -> None:
        """Gradients are complete in this cluster: average them over all clusters."""
        run = self._run
        assert run is not None
        assert self._rounds is not None
        samples, tokens, asked = (int(total) for total in run.local.sum(self._samples, self._tokens, self._terminated))
        self._leaves = asked > 0  # all local processes together, or their checkpoint would not be whole
        scale = getattr(scaler, "_scale", None)  # a scaler that is switched off, as on a CPU, has none
        self._step = Step(
            number=state.global_step + 1,
            samples=samples,
            tokens=tokens,
            batch_hash=self._batch_hash if self.ledger.steps == 0 else 0,
            loss_scale=1.0 if scale is None else float(scale),
            scaled=scale is not None,
        )
        if not run.alone:
            self._refuse_other_gradients()
        self._rounds.before_step(self._step)
        if run.ended is not None:
            # The others stopped after their last step, and our parameters must stay where theirs are.
            self._void = VoidStep(state, self._selected, kwargs["lr_scheduler"])
            run.degrade(f"step {state.global_step + 1} was not taken, but train_loss counts its batch")
        else:
            self.ledger.samples += samples
            self.ledger.tokens += tokens

    def on_optimizer_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Parameters are new: hash them, or average what has changed."""
        if self._run is None:
            return
        if self._void is not None:
            self._void.after_optimizer(state)
            return
        assert self._rounds is not None
        started = self._step_ended or self._step_started
        seconds = time.perf_counter() - started if started is not None else 0.0
        self._rounds.after_step(replace(self._step, seconds=seconds))
        if (step := self._rounds.jump()) is not None:
            for sentence in follow(step, self._step.number, state, kwargs["lr_scheduler"], self.on_skip):
                self._run.degrade(sentence)
        if self._run.ended is not None:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step and keep the counters where the next checkpoint finds them."""
        run = self._run
        if run is None:
            return
        if self._void is not None:
            self._void.after_step(state, control)
            self._void = None
        else:
            self.ledger.steps += 1
        if self._step_started is not None:
            exposed = self.ledger.seconds_exposed - self._exposed_before
            self.ledger.seconds_compute += max(0.0, time.perf_counter() - self._step_started - exposed)
            self._step_started = None
        self._step_ended = time.perf_counter()
        if run.ended is not None:
            control.should_training_stop = True
        if self._leaves:
            control.should_save = True  # and no step after that: see on_save
        if run.local.is_leader:
            self._keep(state)
            if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
                self._write_report()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Replace the metrics by the clusters' mean: best checkpoints and early stopping then agree."""
        if self._run is None or metrics is None:
            return  # an evaluation outside of training
        mine = comparable(metrics)
        if not self._run.alone and self._run.ended is None:
            mine = self._run.agree_on_metrics(mine)
            metrics.update(mine)
        if self._run.ended is not None:
            control.should_training_stop = True
        self.ledger.metrics = mine
        self.ledger.eval_loss = mine.get("eval_loss", self.ledger.eval_loss)
        if self._run.local.is_leader:
            self._keep(state)  # an evaluation comes before its step's checkpoint

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put beside the Trainer's checkpoint what it does not know of."""
        if self._rounds is not None and self._run is not None and self._run.local.is_leader:
            self._rounds.comeback.history.pin()
            arrays = self._rounds.state()
            if arrays:
                save_state(Path(args.output_dir) / f"checkpoint-{state.global_step}", arrays)
        if self._leaves:
            logger.warning(f"nebula: {TERMINATED}: checkpoint-{state.global_step} is written, to resume from")
            raise SystemExit(128 + signal.SIGTERM)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last event before the best model may be loaded: average what has changed since the last round."""
        if self._rounds is not None and (control.should_training_stop or state.global_step >= state.max_steps):
            self._rounds.before_end(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add our scalars to the Trainer's, and rewrite the report."""
        if self._run is None or logs is None or not self._run.local.is_leader:
            return
        if "loss" in logs:
            self.ledger.note_loss(state.global_step, float(logs["loss"]))
            self._keep(state)  # a step is logged before its checkpoint is written
        elif "train_loss" in logs:
            self.ledger.train_loss = float(logs["train_loss"])  # at the end: the mean over the run
        else:
            return
        utilisation = self.ledger.utilisation
        logs["nebula_rounds"] = self.ledger.rounds
        logs["nebula_members"] = len(self.ledger.members)
        logs["nebula_mb_sent"] = round(self.ledger.bytes_sent / 1e6, 3)
        if utilisation is not None:
            logs["nebula_utilisation"] = round(utilisation, 4)
        if self.ledger.privacy is not None:
            logs |= self.ledger.privacy.scalars()
        self._write_report()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the parameters a last time, say goodbye, write the report."""
        run = self._run
        if run is None or self._rounds is None:
            return
        self._rounds.before_end(state.global_step)
        self._rounds.finish(state.global_step)
        self._write_report()
        self.close()
        if run.local.is_leader:
            ledger = self.ledger
            logger.info(
                f"nebula: {ledger.rounds} rounds with {', '.join(ledger.members)}; sent {ledger.bytes_sent / 1e6:.3f} MB, "
                f"received {ledger.bytes_received / 1e6:.3f} MB; utilisation {ledger.utilisation or 1.0:.1%}; "
                f"parameters {ledger.parameter_digest}; security: {self.nebula_args.sync_security}"
            )

    def fail(self, reason: str) -> None:
        """Training ends before its time: tell the other clusters why, and leave a report that says so.

        Args:
            reason: the end of a sentence, such as "it was interrupted (Ctrl-C)".
        """
        if self._run is not None:
            self._run.leave(reason, deliberate=False)
            with contextlib.suppress(OSError):
                self._write_report()

    def checkpoint_first(self) -> bool:
        """This process has been asked to end (SIGTERM): write a checkpoint after the present step, and end then.

        Returns:
            Whether that will be: not if the Trainer writes no checkpoints, or has not begun.
        """
        self._terminated = self._saves and self._run is not None
        return self._terminated

    def close(self) -> None:
        """Forget the run; the next ``train()`` starts a new one."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._run = self._rounds = None
        self._report_path = None
        self._terminated = self._leaves = False

    # Inside

    def _refuse_what_needs_nebula_trainer(self) -> None:
        acting = {"sync_resume": "common", "sync_data": "shard"}
        if problems := [
            f"{name}={value!r} cannot act with the callback alone: use NebulaTrainer, or leave it out"
            for name, value in acting.items()
            if getattr(self.nebula_args, name) == value
        ]:
            raise ConfigurationError(problems)

    def _refuse_other_gradients(self) -> None:
        """What was frozen when training began must stay so: its gradients would not be averaged."""
        for name, parameter in self._staying:
            if not parameter.stop_gradient and gradient(parameter) is not None:
                raise NebulaError(
                    f"{name!r} has a gradient but does not travel, because it was frozen when training began: unfreeze it "
                    "before train(), or set sync_parameters='all'"
                )

    def _keep(self, state: Any) -> None:
        """Put the counters where the next checkpoint finds them."""
        assert self._run is not None
        state.trial_params = {
            **(state.trial_params or {}),
            _STATE_KEY: {
                "exchanges": self._run.number,
                "ledger": self.ledger.state(),
                "history": self._rounds.remembered() if self._rounds is not None else None,
            },
        }

    def _restore(self, state: Any) -> int:
        """Continue the counters of the checkpoint that training resumes from; returns the exchanges done."""
        if state.global_step == 0:
            return 0
        saved = (state.trial_params or {}).get(_STATE_KEY)
        if saved is None:
            assert self._run is not None
            self._run.degrade(
                f"the checkpoint of step {state.global_step} was not written together with other clusters: the "
                "counters of bytes and rounds start at zero"
            )
            return int(state.global_step)
        try:
            self.ledger.restore(dict(saved["ledger"]))
            return int(saved["exchanges"])
        except (KeyError, TypeError, ValueError) as error:
            raise NebulaError(
                f"the checkpoint of step {state.global_step} must hold this cluster's counters, got {saved!r:.80}: remove "
                f"{_STATE_KEY!r} from trial_params in its trainer_state.json to start them at zero"
            ) from error

    def _write_report(self) -> None:
        if self._report_path is not None and self._run is not None and self._run.local.is_leader:
            self._reported_at = time.monotonic()
            try:
                self.ledger.write(self._report_path)
            except OSError as error:  # a full disk, say: a reason not to begin a training, but none to end it
                if self._reports == 0:
                    raise
                self._run.degrade(f"{self._report_path} could not be written: {error.strerror}", once=True)
            else:
                self._reports += 1
