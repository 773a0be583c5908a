"""What the rules do to training: clusters of ranks 4, 8 and 16 with unlike data fine-tune a two-layer classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlenlp_nebula.adapters.merge import Factors, merge_products

Array = npt.NDArray[Any]
CLASSES, WIDTH, HIDDEN, SAMPLES = 10, 48, 64, 1500
ALPHA, RATE, BATCH = 8.0, 1e-2, 64
SHARES = [1 / 3] * 3


class Task:
    """A frozen two-layer network, a low-rank change of its first layer to be learnt, three clusters without a class in common.

    Inputs lie near a subspace, as the activations of a pre-trained model do.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.first = rng.standard_normal((WIDTH, HIDDEN)) / np.sqrt(WIDTH)
        self.second = rng.standard_normal((HIDDEN, CLASSES)) / np.sqrt(HIDDEN)
        change = 2 * rng.standard_normal((WIDTH, 12)) @ rng.standard_normal((12, HIDDEN)) / np.sqrt(12 * WIDTH)
        subspace = np.linalg.qr(rng.standard_normal((WIDTH, 12)))[0].T * np.sqrt(WIDTH / 12)

        def draw(count: int) -> tuple[Array, Array]:
            x = rng.standard_normal((count, 12)) @ subspace + 0.1 * rng.standard_normal((count, WIDTH))
            return x, self.outputs(x, change)[1].argmax(1)

        self.test = draw(4000)
        self.clusters = []
        for classes in np.array_split(rng.permutation(CLASSES), 3):
            x, y = draw(12 * SAMPLES)
            mine = np.isin(y, classes)
            self.clusters.append((x[mine][:SAMPLES], y[mine][:SAMPLES]))

    def outputs(self, x: Array, change: Array) -> tuple[Array, Array]:
        hidden = np.maximum(x @ (self.first + change), 0)
        return hidden, hidden @ self.second

    def accuracy(self, change: Array) -> float:
        x, y = self.test
        return float(np.mean(self.outputs(x, change)[1].argmax(1) == y))

    def gradients(self, factors: Factors, x: Array, y: Array) -> tuple[Array, Array]:
        hidden, logits = self.outputs(x, change_of(factors))
        logits = 4 * logits
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        change = x.T @ (4 * error @ self.second.T * (hidden > 0)) / len(y) * factors.scaling
        return change @ factors.b.T, factors.a.T @ change


def change_of(factors: Factors) -> Array:
    return factors.a.astype(np.float64) @ factors.b * factors.scaling


class Adam:
    def __init__(self, factors: Factors) -> None:
        self.steps = 0
        self.moments = [np.zeros((2, *part.shape)) for part in (factors.a, factors.b)]

    def step(self, factors: Factors, gradients: Sequence[Array]) -> Factors:
        self.steps += 1
        moved = []
        for part, gradient, (mean, square) in zip(factors[:2], gradients, self.moments, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            root = np.sqrt(square / (1 - 0.999**self.steps)) + 1e-8
            moved.append((part - RATE * mean / (1 - 0.9**self.steps) / root).astype(np.float32))
        return Factors(moved[0], moved[1], factors.scaling)


def by_product(members: list[Factors]) -> list[Factors]:
    return [
        Factors(*merge_products(members, SHARES, own.a.shape[1], own.scaling), scaling=own.scaling) for own in members
    ]


def one_by_one(members: list[Factors]) -> list[Factors]:
    """A and B apart, padded with zeros to the largest rank and cut to each cluster's; scalings are allowed for."""
    largest = max(own.a.shape[1] for own in members)
    a, b = np.zeros((WIDTH, largest)), np.zeros((largest, HIDDEN))
    for own, share in zip(members, SHARES, strict=True):
        a[:, : own.a.shape[1]] += share * own.a
        b[: own.a.shape[1]] += share * own.scaling * own.b
    a, b = a.astype(np.float32), b.astype(np.float32)
    ranks = [own.a.shape[1] for own in members]
    return [
        Factors(a[:, :r], (b[:r] / own.scaling).astype(np.float32), own.scaling)
        for r, own in zip(ranks, members, strict=True)
    ]


def train(seed: int, rule: str, ranks: Sequence[int], rounds: int, steps: int) -> float:
    """Accuracy of what the cluster of the largest rank, the last, holds after the last round."""
    task, rng = Task(seed), np.random.default_rng(seed + 1000)
    start = (rng.uniform(-1, 1, (WIDTH, max(ranks))) / np.sqrt(WIDTH)).astype(np.float32)
    members = [Factors(start[:, :r].copy(), np.zeros((r, HIDDEN), dtype=np.float32), ALPHA / r) for r in ranks]
    optimizers = [Adam(own) for own in members]
    for _ in range(rounds):
        for number, (optimizer, (x, y)) in enumerate(zip(optimizers, task.clusters, strict=True)):
            for _ in range(steps):
                batch = rng.integers(0, len(y), BATCH)
                gradients = task.gradients(members[number], x[batch], y[batch])
                if rule == "freeze_a":
                    gradients = np.zeros_like(gradients[0]), gradients[1]
                members[number] = optimizer.step(members[number], gradients)
        members = by_product(members) if rule == "product" else one_by_one(members)
    return task.accuracy(change_of(members[-1]))


def accuracies(rule: str, ranks: Sequence[int], rounds: int, steps: int) -> Array:
    """Per cent, for three seeds."""
    return 100 * np.array([train(seed, rule, ranks, rounds, steps) for seed in range(3)])


def test_averaging_products_beats_averaging_factors_where_ranks_differ() -> None:
    product, mean = (accuracies(rule, (4, 8, 16), 3, 100) for rule in ("product", "mean"))
    assert np.all(product > mean), (product, mean)
    assert np.mean(product - mean) > 3, (product, mean)


def test_products_are_ahead_with_equal_ranks_too_and_a_frozen_a_is_level_with_averaging() -> None:
    product, frozen, mean = (accuracies(rule, (16, 16, 16), 10, 50) for rule in ("product", "freeze_a", "mean"))
    assert np.mean(product - mean) > 2, (product, mean)
    assert np.mean(product) > np.mean(frozen) > np.mean(mean) - 5, (product, frozen, mean)
