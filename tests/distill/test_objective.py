"""The sum of losses is the weighted sum of each, over the positions that count; what is missing is named."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.losses import divergence, hidden
from paddlenlp_nebula.distill.losses.objective import Objective
from paddlenlp_nebula.distill.losses.relations import relation_kl
from paddlenlp_nebula.distill.losses.spec import terms_from_spec
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.errors import NebulaError

MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
PLACES = Places.of(MASK)
SPEC = "kl:tau=2*linear(1,0.5) + ce*0.3 + hidden_mse:6=2*0.1 + hidden_cosine:3=1/6=2 + relations:6=2,heads=2*0.2"


def normal(*shape: int, seed: int = 0, padding: float = 0.0) -> paddle.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values[MASK == 0] = padding
    return paddle.to_tensor(values, stop_gradient=False)


def outputs(padding: float = 0.0) -> tuple[dict, dict, paddle.Tensor]:
    student = {"logits": normal(2, 4, 9, padding=padding)}
    student |= {f"hidden.{layer}": normal(2, 4, 6, seed=layer, padding=padding) for layer in (1, 2)}
    student |= {f"{kind}.2": normal(2, 4, 6, seed=ord(kind), padding=padding) for kind in "qkv"}
    teacher = {"logits": PLACES.rows(normal(2, 4, 9, seed=20))}
    teacher |= {f"hidden.{layer}": PLACES.rows(normal(2, 4, 8, seed=30 + layer)) for layer in (3, 6)}
    teacher |= {f"{kind}.6": PLACES.rows(normal(2, 4, 8, seed=40 + ord(kind))) for kind in "qkv"}
    labels = paddle.to_tensor(np.where(MASK, 5, divergence.IGNORED))
    return student, teacher, labels


def test_it_is_the_weighted_sum() -> None:
    paddle.seed(0)
    objective = Objective(terms_from_spec(SPEC), 6, 8)
    student, teacher, labels = outputs()
    total, values = objective(student, teacher, PLACES, labels, 0.5)

    def rows(name: str) -> paddle.Tensor:
        return PLACES.rows(student[name])

    low, high = (objective.projections[f"teacher_{pair}"] for pair in ("3_student_1", "6_student_2"))
    expected = {
        "kl:tau=2": divergence.kl(rows("logits"), teacher["logits"], 2.0).mean(),
        "ce": divergence.cross_entropy(rows("logits"), PLACES.rows(labels)).mean(),
        "hidden_mse:6=2": hidden.squared_error(high(rows("hidden.2")), teacher["hidden.6"]).mean(),
        "hidden_cosine:3=1/6=2": (
            hidden.cosine(low(rows("hidden.1")), teacher["hidden.3"]).mean()
            + hidden.cosine(high(rows("hidden.2")), teacher["hidden.6"]).mean()
        )
        / 2,
        "relations:6=2,heads=2": sum(
            relation_kl(student[f"{kind}.2"], PLACES.spread(teacher[f"{kind}.6"]), PLACES, 2).mean() for kind in "qkv"
        ),
    }
    assert {label: float(value) for label, value in values.items()} == pytest.approx(
        {label: float(value) for label, value in expected.items()}
    )
    weights = [0.75, 0.3, 0.1, 1.0, 0.2]
    assert float(total) == pytest.approx(sum(w * float(v) for w, v in zip(weights, expected.values(), strict=True)))
    total.backward()
    assert all(parameter.grad is not None for parameter in objective.parameters())
    assert len(objective.parameters()) == 2


def test_padding_never_counts() -> None:
    paddle.seed(0)
    objective = Objective(terms_from_spec(SPEC), 6, 8)
    totals, gradients = [], []
    for padding in (0.0, 1e4):
        student, teacher, labels = outputs(padding)
        total, _ = objective(student, teacher, PLACES, labels, 0.0)
        total.backward()
        totals.append(float(total))
        gradients.append({name: tensor.grad.numpy() for name, tensor in student.items() if tensor.grad is not None})
    assert totals[0] == totals[1]
    assert set(gradients[0]) == set(outputs()[0])
    for name in gradients[0]:
        np.testing.assert_array_equal(gradients[0][name], gradients[1][name])
        np.testing.assert_array_equal(gradients[0][name][MASK == 0], 0)


def test_a_classifier_has_one_row_for_each_sample() -> None:
    places = Places.of(np.ones(3))
    student = paddle.randn([3, 4])
    teacher = {"logits": paddle.randn([3, 4])}
    total, _ = Objective(terms_from_spec("kl + ce"))(
        {"logits": student}, teacher, places, paddle.to_tensor([0, 1, 2]), 0.0
    )
    expected = divergence.kl(student, teacher["logits"]).mean()
    expected += paddle.nn.functional.cross_entropy(student, paddle.to_tensor([0, 1, 2]))
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


def test_what_is_missing_is_named() -> None:
    student, teacher, labels = outputs()
    with pytest.raises(NebulaError, match=r"'kl' needs 'logits' of the teacher, got hidden.3, .*: does the knowledge"):
        Objective(terms_from_spec("kl"))(
            student, {k: v for k, v in teacher.items() if k != "logits"}, PLACES, labels, 0
        )
    with pytest.raises(NebulaError, match="'ce' needs the batch's labels, got none"):
        Objective(terms_from_spec("ce"))(student, teacher, PLACES, None, 0)
    with pytest.raises(NebulaError, match=r"needs 'hidden.4' of the student"):
        Objective(terms_from_spec("hidden_mse:3=4"), 6, 8)(student, teacher, PLACES, labels, 0)
