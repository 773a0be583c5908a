"""NebulaTrainer: a Trainer that trains together with those of other clusters, from start to end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle.io import DistributedBatchSampler
from paddlenlp.trainer import Trainer
from paddlenlp.trainer.trainer import SCHEDULER_NAME
from paddlenlp.trainer.trainer_utils import get_last_checkpoint, has_length
from paddlenlp.utils.log import logger

from paddlenlp_nebula.adapters.lora import freeze_a
from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.callback import NebulaCallback
from paddlenlp_nebula.checkpoint import STATE_NAME
from paddlenlp_nebula.errors import HandshakeError
from paddlenlp_nebula.farewell import telling_the_others
from paddlenlp_nebula.link.handshake import check_same
from paddlenlp_nebula.rounds.base import keeps_state
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.sharding import ClusterShard, shard_dataset, with_known_order

__all__ = ["NebulaTrainer", "NebulaTrainerMixin"]


class NebulaTrainerMixin:
    """What `NebulaTrainer` adds, for any Trainer class: ``class Mine(NebulaTrainerMixin, SFTTrainer)``.

    Besides a `NebulaCallback` in the right place: each cluster trains on its own part of the
    training data (``sync_data``), all agree on the number of steps and so on the learning rate's
    horizon, on the checkpoint to resume from (``sync_resume``), and hear why another one fails.
    """

    args: Any
    model: Any
    train_dataset: Any
    callback_handler: Any
    _skip_global_steps: int
    _skip_steps_since_last_logged: int
    _order_is_known = False  # of the training data: by the epoch's number, whatever the random state

    def __init__(self, *args: Any, nebula_args: NebulaArguments | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nebula_args = nebula_args or NebulaArguments()
        self.nebula_callback = NebulaCallback(self.nebula_args)
        self.nebula_callback.on_skip = self._skip_steps
        # Behind the Trainer's own flow, in front of everything that reads logs or metrics.
        self.callback_handler.callbacks.insert(1, self.nebula_callback)
        if self.nebula_args.sync_data != "own" and self.train_dataset is not None:
            self.train_dataset = shard_dataset(
                self.train_dataset, self.nebula_args.cluster_index, len(self.nebula_args.cluster_names), self.args.seed
            )

    def _skip_steps(self, steps: int) -> None:
        """The Trainer did not take these: it divides its losses by the others, as it does for data that it skips."""
        self._skip_global_steps += steps
        self._skip_steps_since_last_logged += steps

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train together with the other clusters; see ``Trainer.train``.

        Raises:
            NebulaError: the clusters do not meet, do not agree, or one is lost and ``sync_on_loss`` is ``stop``.
        """
        run = self.nebula_callback.join()
        planned = self.args.max_steps
        try:
            with telling_the_others(self.nebula_callback.fail, self.nebula_callback.checkpoint_first):
                resume = self._agree_on_resume(run, resume_from_checkpoint)
                self.nebula_callback.resume_folder = resume
                self.args.max_steps = self._agree_on_steps(run)
                if self.nebula_args.sync_lora_merge == "freeze_a":
                    freeze_a(self.model)  # before several processes are told which gradients to wait for
                return super().train(resume_from_checkpoint=resume, **kwargs)  # type: ignore[misc]
        finally:
            self.args.max_steps = planned
            self.nebula_callback.close()

    def _get_train_sampler(self) -> Any:
        """In one process, too, an order that a resume finds again; one cluster alone trains as without the plugin."""
        sampler = super()._get_train_sampler()  # type: ignore[misc]
        if len(self.nebula_args.cluster_names) > 1:
            sampler = with_known_order(sampler, self.train_dataset, self.args.seed)
        self._order_is_known = isinstance(sampler, DistributedBatchSampler)
        return sampler

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """And the random state: at the end of an epoch the Trainer, which has nothing to skip, does not load it.

        Where the order of the data is drawn from that state, it must not be loaded before the Trainer has skipped what was
        read: an epoch would begin in another order.
        """
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self._order_is_known:
            self._load_rng_state(checkpoint)  # type: ignore[attr-defined]

    def _agree_on_steps(self, run: Run) -> int:
        """The number of steps for everybody: the longest plan, so that no cluster's data is cut short."""
        own = int(self.args.max_steps)
        if run.theirs is not None:  # we come back to a run in which all agree already
            return int(run.theirs.get("max_steps", own))
        if own <= 0:
            loader = self.get_train_dataloader()  # type: ignore[attr-defined]
            if has_length(loader):
                own_per_epoch = max(1, len(loader) // self.args.gradient_accumulation_steps)
                own = int(own_per_epoch * self.args.num_train_epochs)
        notes = run.notes({"max_steps": int(self.args.max_steps), "planned_steps": own, **self._shard_facts()})
        check_same(notes, "max_steps", "set the same max_steps on all clusters, or none and let them agree")
        check_same(notes, "sync_data", "deal one dataset out on all clusters (shard), or let each bring its own (own)")
        check_same(notes, "dataset_length", "sync_data='shard' deals out one dataset: give all clusters the same one")
        check_same(notes, "seed", "sync_data='shard' deals the dataset out by the seed: set the same one")
        agreed = max(note["planned_steps"] for note in notes.values())
        if agreed != own:
            logger.info(
                f"nebula: {agreed} steps for everybody, the longest plan ({own} here): smaller data is gone through again"
            )
        return int(agreed)

    def _shard_facts(self) -> dict[str, Any]:
        """What must be equal for the clusters' parts of the dataset to be disjoint and complete."""
        data = self.train_dataset
        if self.nebula_args.sync_data == "own":
            return {"sync_data": "own", "dataset_length": None, "seed": None}
        if isinstance(data, ClusterShard):
            return {"sync_data": "shard", "dataset_length": data.whole, "seed": int(self.args.seed)}
        return {"sync_data": "shard", "dataset_length": None, "seed": None}  # dealt out in turn

    def _agree_on_resume(self, run: Run, wanted: str | bool | None) -> str | None:
        """The checkpoint to resume from, or None."""
        needed = ["trainer_state.json"]
        needed += [] if self.args.ignore_save_lr_and_optim else [SCHEDULER_NAME]
        path = _latest(Path(self.args.output_dir), needed) if wanted is True else (wanted or None)
        if self.nebula_args.sync_resume == "refuse":
            return path  # the handshake compares the steps
        needed += [STATE_NAME] if keeps_state(self.nebula_args) else []
        own = _checkpoints(Path(path).parent if path else Path(self.args.output_dir), needed, latest=_step_of(path))
        notes = run.notes({"resume": path is not None, "steps": sorted(own)})
        if not any(note["resume"] for note in notes.values()):
            return None
        common = set.intersection(*(set(note["steps"]) for note in notes.values()))
        if not common:
            steps = {name: note["steps"] for name, note in notes.items()}
            raise HandshakeError(
                f"sync_resume=common needs a checkpoint of the same step on all clusters, got {steps}: start all without "
                "resume_from_checkpoint, or copy a checkpoint over"
            )
        logger.info(f"nebula: resuming from step {max(common)}, the highest that all clusters have")
        return str(own[max(common)])


class NebulaTrainer(NebulaTrainerMixin, Trainer):
    """PaddleNLP's Trainer, training one model together with the Trainers of other clusters.

    Args:
        nebula_args: the settings; by default all from the environment (``nebula launch``).
        *args, **kwargs: as for ``paddlenlp.trainer.Trainer``.

    Raises:
        ConfigurationError: the settings are incomplete or wrong.
    """


def _step_of(checkpoint: str | Path | None) -> int | None:
    """The step that a checkpoint's folder is named after; None if it is not."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(checkpoint).name) if checkpoint else None
    return int(match[1]) if match else None


def _latest(folder: Path, needed: Sequence[str]) -> str | None:
    """The last checkpoint that was written to its end; the last one at all if none was."""
    last: str | None = get_last_checkpoint(str(folder))
    whole = _checkpoints(folder, needed)
    if not whole or last == str(whole[max(whole)]):
        return last
    logger.warning(f"nebula: {last} was not written to its end (a full disk?): resuming from {whole[max(whole)]}")
    return str(whole[max(whole)])


def _checkpoints(folder: Path, needed: Sequence[str], latest: int | None = None) -> dict[int, Path]:
    """step -> folder of each complete checkpoint in an output folder, up to that of step ``latest``.

    The Trainer writes its own state first, then the optimizer's, then the scheduler's, and we write ours last: a
    cluster that was killed in between would otherwise resume with a new optimizer, without a word.
    """
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = _step_of(path)
        if step is None or (latest is not None and step > latest):
            continue
        if all((path / name).is_file() for name in needed):
            found[step] = path
    return found
