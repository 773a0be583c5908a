"""Divergences against naive ones in float64, in value and gradient, and at their limits."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.extract import soft_labels
from paddlenlp_nebula.distill.losses.divergence import (
    IGNORED,
    SoftLabels,
    cross_entropy,
    jensen_shannon,
    kl,
    mean,
    reverse_kl,
)
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError
from tests.distill import reference
from tests.distill.reference import Array, check, outcomes, relative_entropy, softmax

ROWS, TOKENS = 4, 11
FAMILIES = [
    pytest.param(kl, relative_entropy, id="kl"),
    pytest.param(reverse_kl, lambda p, q: relative_entropy(q, p), id="reverse_kl"),
    pytest.param(
        lambda s, t, tau: jensen_shannon(s, t, tau, 0.3), lambda p, q: reference.jensen_shannon(p, q, 0.3), id="jsd"
    ),
]
every_family = pytest.mark.parametrize(("divergence", "naive"), FAMILIES)
every_tau = pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 8.0])


def logits(seed: int, scale: float = 3.0) -> Array:
    return scale * np.random.default_rng(seed).standard_normal((ROWS, TOKENS))


def tensor(x: Array) -> paddle.Tensor:
    return paddle.to_tensor(x.astype(np.float32))


def told(teacher: Array, kept: int, tau: float) -> SoftLabels:
    """What a teacher with these logits tells."""
    arrays = soft_labels(tensor(teacher), Places.of(np.ones(len(teacher))), kept, tau)
    return SoftLabels(
        paddle.to_tensor(arrays["ids"].astype(np.int64)),
        paddle.to_tensor(arrays["log_probabilities"]),
        paddle.to_tensor(arrays["log_tail"]),
        tau,
    )


@every_family
@every_tau
def test_all_logits(divergence, naive, tau: float) -> None:
    p = softmax(logits(0) / tau)
    check(
        lambda student: divergence(student, tensor(logits(0)), tau),
        lambda student: tau**2 * naive(p, softmax(student / tau)),
        logits(1),
    )


@every_family
@every_tau
@pytest.mark.parametrize("kept", [1, 3, 10])
def test_soft_labels_are_k_outcomes_and_the_rest_as_one(divergence, naive, tau: float, kept: int) -> None:
    labels = told(logits(0), kept, tau)
    ids = labels.ids.numpy()
    p = outcomes(softmax(logits(0) / tau), ids)
    check(
        lambda student: divergence(student, labels, tau),
        lambda student: tau**2 * naive(p, outcomes(softmax(student / tau), ids)),
        logits(1),
    )


@every_family
@pytest.mark.parametrize("kept", [TOKENS, TOKENS + 5])
def test_with_all_tokens_kept_they_are_the_full_ones(divergence, naive, kept: int) -> None:
    student, other = (paddle.to_tensor(logits(1).astype(np.float32), stop_gradient=False) for _ in range(2))
    soft, full = divergence(student, told(logits(0), kept, 2.0), 2.0), divergence(other, tensor(logits(0)), 2.0)
    soft.sum().backward()
    full.sum().backward()
    np.testing.assert_allclose(soft.numpy(), full.numpy(), rtol=1e-5)
    np.testing.assert_allclose(student.grad.numpy(), other.grad.numpy(), atol=1e-6)


@every_family
def test_soft_labels_are_never_further_away_than_all_logits(divergence, naive) -> None:
    """The data processing inequality; more tokens tell more."""
    student = tensor(logits(1))
    losses = [divergence(student, told(logits(0), kept, 1.0), 1.0).numpy() for kept in range(1, TOKENS + 1)]
    assert (np.diff(losses, axis=0) >= -1e-6).all()


@every_family
def test_it_is_zero_only_where_they_agree(divergence, naive) -> None:
    for teacher in (tensor(logits(0)), told(logits(0), 4, 1.0)):
        student = paddle.to_tensor((logits(0) + 7.0).astype(np.float32), stop_gradient=False)
        value = divergence(student, teacher, 1.0)
        value.sum().backward()
        np.testing.assert_allclose(value.numpy(), 0, atol=1e-6)
        np.testing.assert_allclose(student.grad.numpy(), 0, atol=1e-6)
        assert (divergence(tensor(logits(1)), teacher, 1.0).numpy() > 0.01).all()


def test_the_tail_pulls_at_every_token() -> None:
    student = paddle.to_tensor(logits(1).astype(np.float32), stop_gradient=False)
    labels = told(logits(0), 3, 1.0)
    kl(student, labels).sum().backward()
    assert (student.grad.numpy() != 0).all()
    # A student that gives the kept ones the right proportions, and all of the mass, is not done.
    greedy = np.full((ROWS, TOKENS), -40.0)
    np.put_along_axis(greedy, labels.ids.numpy(), labels.log_probabilities.numpy(), axis=1)
    assert (kl(tensor(greedy), labels).numpy() > 0.1).all()


def test_at_a_high_temperature_it_is_half_the_squared_difference_of_centred_logits() -> None:
    """Hinton, Vinyals, Dean 2015, section 2.1: the gradient tends to (z - v) / N when the logits have mean 0."""
    centred = [x - x.mean(axis=-1, keepdims=True) for x in (logits(0), logits(1))]
    expected = 0.5 * np.square(centred[0] - centred[1]).mean(axis=-1)
    np.testing.assert_allclose(kl(tensor(logits(1)), tensor(logits(0)), 300.0).numpy(), expected, rtol=0.03)


@pytest.mark.parametrize("soft", [False, True])
def test_the_generalised_divergence_tends_to_both_others(soft: bool) -> None:
    """Agarwal et al. 2023, section 2."""
    student = tensor(logits(1, 1.0))
    teacher = told(logits(0, 1.0), 4, 2.0) if soft else tensor(logits(0, 1.0))
    near_0 = jensen_shannon(student, teacher, 2.0, beta=0.01).numpy() / 0.01
    near_1 = jensen_shannon(student, teacher, 2.0, beta=0.99).numpy() / 0.01
    np.testing.assert_allclose(near_0, kl(student, teacher, 2.0).numpy(), rtol=0.05)
    np.testing.assert_allclose(near_1, reverse_kl(student, teacher, 2.0).numpy(), rtol=0.05)


@every_family
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_lose_only_their_own_rounding(divergence, naive, dtype: str) -> None:
    student, teacher = (tensor(x).astype(dtype) for x in (logits(1, 20.0), logits(0, 20.0)))
    student.stop_gradient = False
    value = divergence(student, teacher, 1.0)
    exact = [softmax(x.astype("float32").numpy().astype(np.float64)) for x in (teacher, student)]
    np.testing.assert_allclose(value.numpy(), naive(*exact), rtol=1e-4)
    value.sum().backward()
    assert student.grad.dtype == student.dtype
    assert np.isfinite(student.grad.astype("float32").numpy()).all()


@every_family
def test_small_probabilities_are_not_cut_off(divergence, naive) -> None:
    """Paddle's own log_softmax takes anything below -64 for -64 on a CPU."""
    student, teacher = logits(1, 25.0), logits(0, 25.0)
    assert np.log(softmax(student)).min() < -90
    np.testing.assert_allclose(
        divergence(tensor(student), tensor(teacher), 1.0).numpy(), naive(softmax(teacher), softmax(student)), rtol=1e-5
    )


@every_family
def test_extreme_logits_give_finite_losses_and_gradients(divergence, naive) -> None:
    teacher = np.full((ROWS, TOKENS), -3e4)
    teacher[:, 0] = 3e4
    for labels in (tensor(teacher), told(teacher, 2, 1.0), told(teacher, TOKENS, 1.0)):
        student = paddle.to_tensor(-teacher.astype(np.float32), stop_gradient=False)
        value = divergence(student, labels, 1.0)
        value.sum().backward()
        assert np.isfinite(value.numpy()).all()
        assert np.isfinite(student.grad.numpy()).all()


def test_nothing_flows_back_into_the_teacher() -> None:
    teacher = paddle.to_tensor(logits(0).astype(np.float32), stop_gradient=False)
    student = paddle.to_tensor(logits(1).astype(np.float32), stop_gradient=False)
    kl(student, teacher).sum().backward()
    assert teacher.grad is None


def test_cross_entropy_leaves_rows_without_a_label_out() -> None:
    labels = np.array([3, IGNORED, 10, 0])
    counted = labels != IGNORED

    def naive(x: Array) -> Array:
        return -np.log(softmax(x)[counted, labels[counted]])

    check(lambda student: cross_entropy(student, paddle.to_tensor(labels)), naive, logits(1))


def test_the_mean_of_no_rows_is_zero_with_a_gradient() -> None:
    student = paddle.to_tensor(logits(1).astype(np.float32), stop_gradient=False)
    value = mean(cross_entropy(student, paddle.full([ROWS], IGNORED, dtype="int64")))
    value.backward()
    assert float(value) == 0.0
    np.testing.assert_array_equal(student.grad.numpy(), 0)


def test_what_does_not_fit_together_is_refused() -> None:
    student = tensor(logits(1))
    with pytest.raises(NebulaError, match=r"logits of one shape, got \[4, 9\] and \[4, 11\]"):
        kl(student, tensor(logits(0)[:, :9]))
    with pytest.raises(NebulaError, match="at temperature 2 cannot be used at 1"):
        kl(student, told(logits(0), 3, 2.0))
    with pytest.raises(NebulaError, match="for the student's 4 rows, got 2"):
        kl(student, told(logits(0)[:2], 3, 1.0))
