"""Clusters of one process: each a replica with an optimizer of its own, exchanging over loopback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle

from benchmarks.quality.model import Decoder
from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.rounds.base import codec_for, final_codec_for
from paddlenlp_nebula.selection import Selection, select
from paddlenlp_nebula.strategy.every_step import Contribution, EveryStep, apply_average
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.strategy.local_steps import LocalSteps, LocalWork, apply_merge
from paddlenlp_nebula.strategy.outer import OuterOptimizer
from paddlenlp_nebula.tensors import read_into, write
from paddlenlp_nebula.transport.channel import CHUNK_BYTES, CHUNKS, Channel
from paddlenlp_nebula.transport.loopback import loopback_pair

__all__ = ["Cluster", "Clusters", "clusters_of", "overwrite"]

_TIMEOUT_S = 600.0


class Cluster:
    """A replica, its optimizer and its strategy.

    Args:
        link: to the others.
        model: its replica; equal on all clusters at the start.
        arguments: the strategy and its options.
    """

    def __init__(self, link: Link, model: Decoder, arguments: NebulaArguments) -> None:
        self.link = link
        self.model = model
        self.selection = select(model, "trainable")
        self.optimizer = paddle.optimizer.AdamW(
            learning_rate=0.0,
            beta2=0.95,
            weight_decay=0.1,
            parameters=model.parameters(),
            grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
        )
        self._local = arguments.sync_strategy == "local_steps"
        self._strategy: Any = None
        self._arguments = arguments

    def join(self) -> None:
        """Prepare the exchange, from the parameters as they are now."""
        arguments = self._arguments
        party = Party(self.link, on_loss="stop", quorum=1, report=print)
        exchange = Exchange(self.selection, codec_for(arguments), party)
        if not self._local:
            self._strategy = EveryStep(exchange)
            return
        self._strategy = LocalSteps(
            exchange,
            OuterOptimizer(arguments.sync_outer, arguments.sync_outer_lr, arguments.sync_outer_momentum),
            same_step=True,
            final_codec=final_codec_for(arguments),
            keep_unsent=arguments.sync_keep_unsent,
        )

    def compute(self, windows: Any) -> float:
        """Gradients of a batch, int64 of shape (windows, context + 1); its loss."""
        loss = self.model(paddle.to_tensor(windows))
        loss.backward()
        return float(loss)

    def step(self, lr: float) -> None:
        """An optimizer step with the present gradients."""
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self.optimizer.clear_grad()
        if not self._local:
            self._strategy.exchange.refresh_digests()

    def average_gradients(self, step: int) -> None:
        """``every_step``: put the average of all clusters' gradients in the place of the own ones."""
        average = self._strategy.average(Contribution(step, weight=1.0))
        apply_average(self.selection, average.values, average.present)

    def merge(self, step: int, final: bool) -> None:
        """``local_steps``: a round."""
        merge = self._strategy.merge(LocalWork(step, weight=1.0, final=final))
        buckets = self._strategy.exchange.buckets
        parameters = self.selection.parameters
        apply_merge(
            self.selection, buckets, merge.parts, merge.values, lambda index, values: write(parameters[index], values)
        )

    @property
    def bytes_sent(self) -> int:
        """Headers and payloads of all messages."""
        return sum(self.link.bytes_sent.values())

    def parameters(self) -> Float32Vector:
        """All of them, shape (numel,)."""
        flat: Float32Vector = np.empty(self.selection.numel, dtype=np.float32)
        for index, parameter in enumerate(self.selection.parameters):
            read_into(parameter, 0, parameter.size, flat[slice(*self.selection.offsets[index : index + 2])])
        return flat

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state, by the parameters' numbers."""
        moments = self.optimizer.state_dict()
        found: dict[str, Any] = {"parameters": self.parameters()}
        for index, parameter in enumerate(self.selection.parameters):
            for name, value in moments.items():
                if name.startswith(f"{parameter.name}_"):
                    found[f"{index}/{name.removeprefix(parameter.name)}"] = value.numpy()
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another cluster's state."""
        overwrite(self.selection, state["parameters"])
        moments = {}
        for name, value in state.items():
            index, slash, suffix = name.partition("/")
            if slash:
                moments[self.selection.parameters[int(index)].name + suffix] = paddle.to_tensor(value)
        self.optimizer.set_state_dict(moments)


class Clusters:
    """All of them, in order. Rounds run in threads, one per cluster; everything else one after the other."""

    def __init__(self, members: Sequence[Cluster]) -> None:
        self.members = members
        self._threads = ThreadPoolExecutor(len(members))

    def together(self, act: Callable[[Cluster], None]) -> None:
        """The same act on every cluster at once."""
        for outcome in [self._threads.submit(act, member) for member in self.members]:
            outcome.result()

    def close(self) -> None:
        for member in self.members:
            member.link.close()
        self._threads.shutdown()


def clusters_of(models: Sequence[Decoder], arguments: NebulaArguments) -> Clusters:
    """Clusters with a replica each, joined by loopback."""
    names = tuple(arguments.cluster_names)
    channels: dict[str, dict[str, Channel]] = {name: {} for name in names}
    for a, b in itertools.combinations(names, 2):
        channels[a][b], channels[b][a] = loopback_pair(a, b, CHUNK_BYTES, CHUNKS)
    links = [Link(name, names, channels[name], timeout_s=_TIMEOUT_S) for name in names]
    return Clusters([Cluster(link, model, arguments) for link, model in zip(links, models, strict=True)])


def overwrite(selection: Selection, flat: Float32Vector) -> None:
    """Give all parameters new values, shape (numel,)."""
    for index, parameter in enumerate(selection.parameters):
        write(parameter, flat[slice(*selection.offsets[index : index + 2])])
