"""From a teacher's outputs over bytes to a student's loss: what is lost on the way is what the formats say."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.distill.extract import tell
from paddlenlp_nebula.distill.identity import Identity, batch_fingerprint
from paddlenlp_nebula.distill.knowledge.knowledge import Extent
from paddlenlp_nebula.distill.knowledge.registry import knowledge_from_spec, spec_of
from paddlenlp_nebula.distill.losses.objective import Objective
from paddlenlp_nebula.distill.losses.spec import terms_from_spec
from paddlenlp_nebula.distill.messages import Answer
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.targets import targets
from paddlenlp_nebula.errors import NebulaError

MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
VOCABULARY, WIDTH = 300, 16
PLACES = Places.of(MASK)
EXTENT = Extent(rows=6, samples=2, vocabulary=VOCABULARY, width=WIDTH, longest=4)


def outputs(seed: int) -> dict[str, paddle.Tensor]:
    paddle.seed(seed)
    names = ["hidden.2", "q.2", "k.2", "v.2"]
    return {"logits": 4 * paddle.randn([2, 5, VOCABULARY])} | {name: paddle.randn([2, 5, WIDTH]) for name in names}


def over_the_wire(spec: str, teacher: dict[str, paddle.Tensor]) -> dict:
    kinds = knowledge_from_spec(spec)
    question = Identity(5, batch_fingerprint({"mask": MASK}), "a" * 32, "b" * 32, spec_of(kinds))
    data = Answer.to(question, kinds, tell(kinds, teacher, PLACES), EXTENT).pack()
    arrays = Answer.parse(memoryview(data), "east").arrays(question, kinds, EXTENT, "east")
    return targets(arrays, kinds)


@pytest.mark.parametrize(
    ("knowledge", "loss", "tolerance"),
    [
        ("logits:top300,fp16,tau=2", "kl:tau=2", 2e-3),
        ("logits:top300,tau=2", "kl:tau=2", 2e-2),
        ("logits:top64", "kl", 1e-2),
        ("logits:top300", "reverse_kl", 1e-2),
        ("hidden:2", "hidden_mse:2=2", 1e-3),
        ("hidden:2,fp16", "hidden_cosine:2=2", 1e-4),
        ("attention-relations:2", "relations:2=2,heads=4", 1e-2),
        ("logits:top64 + hidden:2 + attention-relations:2", "kl + hidden_mse:2=2 + relations:2=2,heads=4", 1e-2),
    ],
)
def test_the_loss_is_that_of_a_teacher_in_the_same_process(knowledge: str, loss: str, tolerance: float) -> None:
    paddle.seed(7)
    objective, teacher, student = Objective(terms_from_spec(loss), WIDTH, WIDTH), outputs(0), outputs(1)
    here = {name: PLACES.rows(tensor) for name, tensor in teacher.items()}
    expected, _ = objective(student, here, PLACES, None, 0.0)
    result, _ = objective(student, over_the_wire(knowledge, teacher), PLACES, None, 0.0)
    assert float(result) == pytest.approx(float(expected), rel=tolerance)


def test_labels_and_sequences_come_as_they_were() -> None:
    generated = np.array([[5, 6, 7, 0], [8, 0, 0, 0]], np.int32)
    teacher = outputs(0) | {"sequence": generated, "lengths": np.array([3, 1], np.int32)}
    result = over_the_wire("labels + sequence", teacher)
    assert {tensor.dtype for tensor in result.values()} == {paddle.int64}
    np.testing.assert_array_equal(result["labels"].numpy(), PLACES.rows(teacher["logits"]).argmax(axis=-1).numpy())
    np.testing.assert_array_equal(result["sequence"].numpy(), generated)


def test_low_rank_is_compared_through_a_projection_to_it() -> None:
    objective = Objective(terms_from_spec("hidden_mse:2=2"), WIDTH, 4)
    student = outputs(1)
    loss, _ = objective(student, over_the_wire("hidden:2,lowrank:4", outputs(0)), PLACES, None, 0.0)
    loss.backward()
    assert objective.parameters()[0].shape == [WIDTH, 4]
    assert objective.parameters()[0].grad is not None


def test_a_layer_that_the_teacher_lacks_is_named() -> None:
    with pytest.raises(NebulaError, match=r"hidden:2/9 needs the teacher's hidden.9, got logits, hidden.2, .* layer\?"):
        tell(knowledge_from_spec("hidden:2/9"), outputs(0), PLACES)
