"""One cluster that does nothing but exchange: ``exchange.py CLUSTER SETTINGS``; prints what it measured as JSON.

The model's gradients are random numbers; everything between them and the other cluster is as in training.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

import paddlenlp_nebula.rounds.every_step as rounds_module
from paddlenlp_nebula import NebulaArguments
from paddlenlp_nebula.bench.meters import couriers, forget_peak, memory, wire_bytes
from paddlenlp_nebula.ledger.ledger import Ledger
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.stream import Stream
from paddlenlp_nebula.rounds.base import Step
from paddlenlp_nebula.run import Run
from paddlenlp_nebula.selection import select
from paddlenlp_nebula.strategy.every_step import EveryStep
from paddlenlp_nebula.strategy.exchange import Exchange

# "link" is copying into chunks and checksums, "reduce" also the look for infinities and whatever else is left.
PHASES = ("gather", "encode", "decode", "link", "wait", "reduce", "write", "digest")


class Stopwatch:
    """Seconds, and seconds of computing, spent in each phase, without those of phases inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.cpu_seconds: Counter[str] = Counter()
        self._stack: list[str] = []
        self._since = (0.0, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function by one that is timed."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return original(*arguments, **options)

        setattr(owner, attribute, timed)

    def _charge(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        if self._stack:
            self.seconds[self._stack[-1]] += now[0] - self._since[0]
            self.cpu_seconds[self._stack[-1]] += now[1] - self._since[1]
        self._since = now


def dense_model(parameters: int) -> nn.Layer:
    """An embedding and linear layers with exactly this many parameters."""
    width = 1024 if parameters >= 8 << 20 else 64
    layers: list[nn.Layer] = [nn.Embedding(max(1, parameters // 2 // width), width)]
    left = parameters - layers[0].weight.size
    while left >= width * width:
        layers.append(nn.Linear(width, width, bias_attr=False))
        left -= width * width
    if left:
        layers.append(nn.Linear(1, left, bias_attr=False))
    return nn.LayerList(layers)


def lora_model(rank: int) -> nn.Layer:
    """MiniLM-L6's shapes with LoRA on queries, keys and values, random weights."""
    from paddlenlp.peft import LoRAConfig, LoRAModel
    from paddlenlp.transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    base = BertForSequenceClassification(BertConfig(**shape, num_labels=7))
    targets = [".*q_proj.*", ".*k_proj.*", ".*v_proj.*"]
    model = LoRAModel(base, LoRAConfig(target_modules=targets, r=rank, lora_alpha=2 * rank, dtype="float32"))
    model.mark_only_lora_as_trainable()
    return model


def main() -> None:
    cluster, settings = sys.argv[1], json.loads(sys.argv[2])
    paddle.set_device("cpu")
    paddle.seed(1)
    model = lora_model(settings["lora_rank"]) if settings.get("lora_rank") else dense_model(settings["parameters"])
    selection = select(model, "trainable")
    random = np.random.default_rng(len(cluster))
    for parameter in selection.parameters:
        parameter.grad = paddle.to_tensor(random.standard_normal(parameter.shape, dtype=np.float32))
    arguments = NebulaArguments(
        cluster=cluster,
        clusters="west,east",
        rendezvous=settings["rendezvous"],
        sync_codec=settings["codec"],
        sync_timeout_s=120,
        sync_security="none",
    )
    watch = Stopwatch()
    watch.watch(rounds_module, "apply_average", "write")
    for owner, attribute, name in (
        (Link, "post", "link"),
        (Link, "_wait", "wait"),
        (Stream, "pump", "link"),
        (EveryStep, "_gather", "gather"),
        (EveryStep, "average", "reduce"),
        (Exchange, "refresh_digests", "digest"),
    ):
        watch.watch(owner, attribute, name)
    ledger = Ledger()
    ledger.facts = {"parameters_selected": selection.numel, "clusters": ["west", "east"]}
    run = Run(arguments, ledger)
    forget_peak()
    before = memory()
    run.join()
    optimizer = paddle.optimizer.SGD(parameters=list(selection.parameters))
    every_step_rounds = rounds_module.EveryStepRounds(run, selection, optimizer, settings["rounds"])
    every_step_rounds.prepare(model, {}, step=0, number=0, state=None)
    codec = every_step_rounds.exchange._codec
    watch.watch(codec, "encode", "encode")
    watch.watch(codec, "decode", "decode")
    start_peak = memory()["peak"]
    rounds = []
    forget_peak()
    for step in range(1, settings["rounds"] + 1):
        run.notes({"ready": True})  # both begin at the same moment
        watch.seconds.clear()
        watch.cpu_seconds.clear()
        wire, began = wire_bytes(), time.perf_counter()
        every_step_rounds.before_step(Step(step, samples=1, tokens=1))
        averaged = time.perf_counter()
        with paddle.no_grad():
            for parameter in selection.parameters:
                parameter.subtract_(parameter.grad)  # a step that needs no memory of its own
        stepped = time.perf_counter()
        every_step_rounds.after_step(Step(step, samples=1, tokens=1))
        seconds = averaged - began + time.perf_counter() - stepped
        now = wire_bytes()
        entry = ledger.per_round[-1]
        rounds.append(
            {
                "seconds": seconds,
                "phases": {name: watch.seconds[name] for name in PHASES},
                "cpu_phases": {name: watch.cpu_seconds[name] for name in PHASES},
                "bytes_sent": entry.bytes_sent,
                "bytes_received": entry.bytes_received,
                "device_sent": now[0] - wire[0],
                "device_received": now[1] - wire[1],
            }
        )
    peak = memory()
    courier = memory(couriers()[0].pid)
    every_step_rounds.finish(settings["rounds"])
    print(
        json.dumps(
            {
                "parameters": selection.numel,
                "rounds": rounds,
                "before": before,
                "start_peak": start_peak,
                "rounds_peak": peak["peak"],
                "shared": peak["shared"],
                "courier": courier,
                "digest": ledger.parameter_digest,
                "report": ledger.report(),
            }
        )
    )


if __name__ == "__main__":
    main()
