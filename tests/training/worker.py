"""One process of a training test: runs a list of specs one after another, because importing Paddle is slow.

    python worker.py CLUSTER SPECS.json OUT_FOLDER

For each spec it writes OUT_FOLDER/NAME.CLUSTER.rRANK.json (result or error), .npz (final parameters) and .state.npz
(the optimizer's state). CLUSTER "reference" trains without the plugin on the concatenation of all clusters' batches,
and "local-reference" each cluster's model by itself, averaging them by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import paddle
from models import build, samples
from paddle.io import Dataset, IterableDataset
from paddlenlp.trainer import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from paddlenlp_nebula import NebulaArguments, NebulaCallback, NebulaTrainer
from paddlenlp_nebula.checkpoint import STATE_NAME


class Stream(IterableDataset):
    """The batches of one cluster, or of all of them concatenated, in a fixed order."""

    def __init__(
        self, kind: str, batches: dict[str, int], clusters: list[str], lengths: dict[str, int], pause_s: float = 0.0
    ) -> None:
        super().__init__()
        self._kind, self._batches, self._clusters, self._lengths = kind, batches, clusters, lengths
        self._pause_s = pause_s

    def __iter__(self):
        step = 0
        while True:
            for cluster in self._clusters:
                size = self._batches[cluster]
                time.sleep(self._pause_s)
                yield from samples(self._kind, cluster, step * size, (step + 1) * size, self._lengths.get(cluster))
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
        self.rates: list[float] = []
        self.evaluations: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_optimizer_begin(self, args, state, control, **kwargs):
        self.rates.append(kwargs["optimizer"].get_lr())

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


class MasterSGD(paddle.optimizer.SGD):
    """Steps float32 masters of bfloat16 parameters, as optimizers do on a GPU with ``multi_precision``."""

    def __init__(self, schedule, parameters) -> None:
        super().__init__(schedule, parameters=parameters)
        self._master_weights = {p.name: p.detach().astype("float32") for p in parameters}

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self._parameter_list:
            master = self._master_weights[parameter.name]
            master.subtract_(self.get_lr() * parameter.grad.astype("float32"))
            parameter.set_value(master.astype("bfloat16"))


def merged(spec: dict, cluster: str) -> dict:
    """A spec as it is for one cluster."""
    return {**spec, **spec.get("per_cluster", {}).get(cluster, {})}


def kind_of(spec: dict) -> str:
    """The kind of samples that a spec's model takes."""
    return "vectors" if spec["model"] == "mlp" or spec["model"].startswith("mlp-") else "tokens"


def training_arguments(spec: dict, folder: str, batch: int) -> TrainingArguments:
    """Those of a spec; ``batch`` is the number of samples per process."""
    defaults = {
        "max_steps": 20,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
        "seed": spec.get("seed", 7),
    }
    return TrainingArguments(
        output_dir=folder, device="cpu", per_device_train_batch_size=batch, **{**defaults, **spec.get("train", {})}
    )


def write_parameters(model: paddle.nn.Layer, path: Path) -> None:
    """All parameters, by their numbers."""
    np.savez(path, **{f"{i:03d}": p.astype("float32").numpy() for i, p in enumerate(model.parameters())})


def optimizer_state(model: paddle.nn.Layer, optimizer) -> dict[str, np.ndarray]:
    """Moments and master weights: "PARAMETER NUMBER KIND" -> array."""
    state = dict(optimizer.state_dict())
    state.pop("LR_Scheduler", None)
    state |= {f"{name}_master": tensor for name, tensor in state.pop("master_weights", {}).items()}
    return {
        f"{i:03d} {key.removeprefix(p.name)}": tensor.astype("float32").numpy()
        for i, p in enumerate(model.parameters())
        for key, tensor in state.items()
        if key.startswith(f"{p.name}_")
    }


def spoil(checkpoint: Path, how: str) -> None:
    """Do something to what a checkpoint keeps besides the Trainer's own files."""
    if how == "missing":
        (checkpoint / STATE_NAME).unlink()
    elif how == "damaged":
        (checkpoint / STATE_NAME).write_bytes(b"\x10" * 100)


def run(spec: dict, cluster: str, out: Path) -> dict:
    if cluster == "local-reference":
        import local_reference

        return local_reference.run(spec, out)
    spec = merged(spec, cluster)
    clusters = spec["clusters"]
    reference = cluster == "reference"
    paddle.seed(spec.get("seed", 7))
    np.random.seed(7)
    model = build(spec["model"])
    kind = kind_of(spec)
    batches = {name: spec.get("per_cluster", {}).get(name, {}).get("batch", spec.get("batch", 4)) for name in clusters}
    processes = spec.get("processes", 1)
    own = sum(batches.values()) if reference else batches[cluster]
    if "items" in spec:
        train = Items(kind, spec.get("items_owner", "shared"), spec["items"])
    else:
        sources = clusters if reference else [cluster]
        train = Stream(kind, batches, sources, spec.get("length", {}), spec.get("pause_s", 0.0))
    folder = str(out / spec.get("output", spec["name"]) / cluster)
    arguments = training_arguments(spec, folder, own // (1 if reference else processes))
    record = Record()
    callbacks = [record]
    if patience := spec.get("patience"):
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=patience))
    if "stop_at" in spec:
        callbacks.append(Stopper(spec["stop_at"]))
    if "kill_at" in spec:
        callbacks.append(Killer(spec["kill_at"]))
    optimizers = (None, None)
    if "optimizer" in spec and spec["optimizer"] != "adamw":
        schedule = paddle.optimizer.lr.PolynomialDecay(arguments.learning_rate, arguments.max_steps, end_lr=0.0)
        kind = {"sgd": paddle.optimizer.SGD, "masters": MasterSGD}[spec["optimizer"]]
        optimizers = (kind(schedule, parameters=model.parameters()), schedule)
    common = {
        "optimizers": optimizers,
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
            tls_ca=str(out / "keys/ca.pem"),
            tls_cert=str(out / f"keys/{cluster}.pem"),
            tls_key=str(out / f"keys/{cluster}.key"),
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
        spoil(Path(resume), spec.get("spoil", ""))
    trainer.train(resume_from_checkpoint=resume)
    if ledger is not None:
        ledger = callback.ledger
    stem = f"{spec['name']}.{cluster}.r{paddle.distributed.get_rank()}"
    write_parameters(model, out / f"{stem}.npz")
    np.savez(out / f"{stem}.state.npz", **optimizer_state(model, trainer.optimizer))
    return {
        "losses": record.losses,
        "rates": record.rates,
        "evaluations": record.evaluations,
        "steps": trainer.state.global_step,
        "report": ledger.report() if ledger is not None else None,
        "trainable": sum(int(np.prod(p.shape)) for p in model.parameters() if not p.stop_gradient),
    }


def perform(spec: dict, cluster: str, out: Path) -> None:
    """Run a spec and write its result, or its error."""
    try:
        result = run(spec, cluster, out)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    rank = paddle.distributed.get_rank()
    (out / f"{spec['name']}.{cluster}.r{rank}.json").write_text(json.dumps(result))


def main() -> None:
    cluster, specs, out = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    for spec in specs:
        perform(spec, cluster, out)


if __name__ == "__main__":
    main()
