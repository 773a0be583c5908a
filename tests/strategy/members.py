"""Clusters as threads, each with a small model of its own, exchanging over loopback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.link.membership import Party
from paddlenlp_nebula.selection import select
from paddlenlp_nebula.strategy.exchange import Exchange
from paddlenlp_nebula.tensors import gradient, set_gradient

from ..link.clusters import NAMES, at_once, meet
from ..models import Tied


class Member:
    """A cluster: its model, its gradients, its exchange."""

    def __init__(self, link: Link, codec: str = "fp32", on_loss: str = "stop") -> None:
        self.link = link
        self.model = Tied()
        self.sentences: list[str] = []  # that the party has reported
        self.party = Party(link, on_loss=on_loss, quorum=1, report=self.sentences.append)
        self.prepare(codec)

    def prepare(self, codec: str) -> None:
        """Select and cut the model as it is now."""
        self.selection = select(self.model, "trainable")
        self.exchange = Exchange(self.selection, codec_from_spec(codec), self.party)

    def set_gradients(self, seed: int, scale: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        for parameter in self.selection.parameters:
            set_gradient(parameter, scale * rng.standard_normal(parameter.size, dtype=np.float32))

    def flat_gradient(self) -> Any:
        """All gradients, those that are None as zeros."""
        gradients = [gradient(p) for p in self.selection.parameters]
        zeros = [np.zeros(p.size, np.float32) for p in self.selection.parameters]
        return np.concatenate([z if g is None else g.numpy().ravel() for z, g in zip(zeros, gradients, strict=True)])

    def flat(self) -> Any:
        """All selected parameters."""
        return np.concatenate([parameter.numpy().ravel() for parameter in self.selection.parameters])


def together(group: Sequence[Any], act: Callable[[Any, int], Any]) -> list[Any]:
    """Each member's act in a thread; results or errors, in order."""
    return list(at_once({m.link.cluster: functools.partial(act, m, i) for i, m in enumerate(group)}).values())


def links(count: int) -> list[Link]:
    return list(meet(*NAMES[:count]).values())
