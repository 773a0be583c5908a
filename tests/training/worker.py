"""One process of a training test: runs a list of specs one after another, because importing Paddle is slow.

    python worker.py CLUSTER SPECS.json OUT_FOLDER

For each spec it writes OUT_FOLDER/NAME.CLUSTER.rRANK.json (result or error) and .npz (final parameters).
CLUSTER "reference" trains without the plugin on the concatenation of all clusters' batches.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import paddle
from models import build, samples
from paddle.io import Dataset, IterableDataset
from paddlenlp.trainer import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from paddlenlp_nebula import NebulaArguments, NebulaCallback, NebulaTrainer


class Stream(IterableDataset):
    """The batches of one cluster, or of all of them concatenated, in a fixed order."""

    def __init__(self, kind: str, batches: dict[str, int], clusters: list[str]) -> None:
        super().__init__()
        self._kind, self._batches, self._clusters = kind, batches, clusters

    def __iter__(self):
        step = 0
        while True:
            for cluster in self._clusters:
                size = self._batches[cluster]
                yield from samples(self._kind, cluster, step * size, (step + 1) * size)
            step += 1


class Items(Dataset):
    """A map-style dataset."""

    def __init__(self, kind: str, owner: str, count: int) -> None:
        super().__init__()
        self._items = samples(kind, owner, 0, count)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int):
        return self._items[index]


def stack(items: list[dict]) -> dict:
    """A batch of numpy arrays: data workers must not make Paddle tensors."""
    return {key: np.stack([item[key] for item in items]) for key in items[0]}


class Record(TrainerCallback):
    """What happened at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append({"step": state.global_step, **metrics})


class Stopper(TrainerCallback):
    """Asks its own Trainer to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


class Killer(TrainerCallback):
    """Ends the process without a word once a step is reached."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os._exit(9)


def run(spec: dict, cluster: str, out: Path) -> dict:
    spec = {**spec, **spec.get("per_cluster", {}).get(cluster, {})}
    clusters = spec["clusters"]
    reference = cluster == "reference"
    paddle.seed(spec.get("seed", 7))
    np.random.seed(7)
    model = build(spec["model"])
    kind = "tokens" if spec["model"] != "mlp" and not spec["model"].startswith("mlp-") else "vectors"
    batches = {name: spec.get("per_cluster", {}).get(name, {}).get("batch", spec.get("batch", 4)) for name in clusters}
    processes = spec.get("processes", 1)
    own = sum(batches.values()) if reference else batches[cluster]
    if "items" in spec:
        train = Items(kind, spec.get("items_owner", "shared"), spec["items"])
    else:
        train = Stream(kind, batches, clusters if reference else [cluster])
    arguments = TrainingArguments(
        output_dir=str(out / spec.get("output", spec["name"]) / cluster),
        device="cpu",
        per_device_train_batch_size=own // (1 if reference else processes),
        **{
            "max_steps": 20,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": [],
            "seed": spec.get("seed", 7),
            **spec.get("train", {}),
        },
    )
    record = Record()
    callbacks = [record]
    if patience := spec.get("patience"):
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=patience))
    if "stop_at" in spec:
        callbacks.append(Stopper(spec["stop_at"]))
    if "kill_at" in spec:
        callbacks.append(Killer(spec["kill_at"]))
    common = {
        "model": model,
        "args": arguments,
        "train_dataset": train,
        "callbacks": callbacks,
        "data_collator": stack,
        "eval_dataset": Items(kind, f"eval-{cluster}", spec["eval_items"]) if "eval_items" in spec else None,
    }
    if reference or spec.get("trainer") == "plain":
        trainer, ledger = Trainer(**common), None
    else:
        nebula = NebulaArguments(
            cluster=cluster,
            clusters=",".join(clusters),
            rendezvous=spec["rendezvous"],
            sync_timeout_s=30,
            **{"sync_data": "own", **spec.get("nebula", {})},
        )
        if spec.get("trainer") == "callback":
            callback = NebulaCallback(nebula)
            common["callbacks"] = [callback, *callbacks]
            trainer = Trainer(**common)
        else:
            trainer = NebulaTrainer(**common, nebula_args=nebula)
            callback = trainer.nebula_callback
        ledger = callback.ledger
    resume = spec.get("resume")
    if isinstance(resume, int) and resume is not True:
        resume = f"{arguments.output_dir}/checkpoint-{resume}"
    trainer.train(resume_from_checkpoint=resume)
    if ledger is not None:
        ledger = callback.ledger
    arrays = {f"{i:03d}": p.astype("float32").numpy() for i, p in enumerate(model.parameters())}
    rank = paddle.distributed.get_rank()
    np.savez(out / f"{spec['name']}.{cluster}.r{rank}.npz", **arrays)
    return {
        "losses": record.losses,
        "evaluations": record.evaluations,
        "steps": trainer.state.global_step,
        "report": ledger.report() if ledger is not None else None,
        "trainable": sum(int(np.prod(p.shape)) for p in model.parameters() if not p.stop_gradient),
    }


def main() -> None:
    cluster, specs, out = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    for spec in specs:
        try:
            result = run(spec, cluster, out)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        rank = paddle.distributed.get_rank()
        (out / f"{spec['name']}.{cluster}.r{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
