"""The table of kinds of knowledge that every contract test runs over."""

from __future__ import annotations

from functools import cache

import numpy as np

from paddlenlp_nebula.distill.knowledge.knowledge import Arrays, Extent, Knowledge
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec

SPECS = [
    "logits:top32",
    "logits:top1",
    "logits:top8,fp16",
    "logits:top4,tau=2.5",
    "hidden:0",
    "hidden:3/6,fp16",
    "hidden:6,lowrank:16",
    "attention-relations:6",
    "attention-relations:2,fp16",
    "sequence",
    "labels",
]
"""One or more specs of each family; each family of the registry must occur."""

EXTENT = Extent(rows=7, samples=3, vocabulary=1000, width=48, longest=9)
EXTENTS = [
    EXTENT,
    Extent(rows=0, samples=0, vocabulary=50, width=32, longest=4),
    Extent(rows=1, samples=1, vocabulary=2, width=1, longest=1),
    Extent(rows=5, samples=5, vocabulary=32, width=384, longest=3),
    Extent(rows=40, samples=2, vocabulary=152_064, width=65, longest=70),
]


def named(spec: str) -> Knowledge:
    (kind,) = knowledge_from_spec(spec)
    return kind


@cache
def log_probabilities(extent: Extent, seed: int = 0, scale: float = 4.0) -> np.ndarray:
    """A teacher's, float64, shape (rows, vocabulary)."""
    logits = scale * np.random.default_rng(seed).standard_normal((extent.rows, extent.vocabulary))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def told(log_p: np.ndarray, kept: int) -> Arrays:
    """The most probable tokens, most probable first as a device gives them, and the rest."""
    kept = min(kept, log_p.shape[1])
    ids = np.argpartition(-log_p, kept - 1, axis=1)[:, :kept]
    ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(log_p, ids, 1), axis=1), 1)
    rest = np.exp(log_p)
    np.put_along_axis(rest, ids, 0.0, axis=1)
    with np.errstate(divide="ignore"):
        tail = np.maximum(np.log(rest.sum(axis=1)), -1e4)
    return {
        "ids": ids.astype(np.int32),
        "log_probabilities": np.take_along_axis(log_p, ids, 1).astype(np.float32),
        "log_tail": tail.astype(np.float32),
    }


def arrays_of(kind: Knowledge, extent: Extent, seed: int = 0) -> Arrays:
    """Arrays that this kind can encode."""
    generator = np.random.default_rng(seed)
    family = kind.spec.partition(":")[0]
    if family == "logits":
        return told(log_probabilities(extent, seed), kind.kept)
    if family == "labels":
        return {"labels": generator.integers(0, extent.vocabulary, extent.rows, dtype=np.int32)}
    if family == "sequence":
        lengths = generator.integers(0, extent.longest + 1, extent.samples, dtype=np.int32)
        sequence = generator.integers(0, extent.vocabulary, (extent.samples, extent.longest), dtype=np.int32)
        return {"lengths": lengths, "sequence": sequence * (np.arange(extent.longest) < lengths[:, np.newaxis])}
    shape = (extent.rows, kind.width(extent))
    return {name: generator.standard_normal(shape).astype(np.float32) for name in kind.names()}
