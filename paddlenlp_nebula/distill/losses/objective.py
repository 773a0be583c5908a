"""What a student minimises in all: a weighted sum of losses, and the layers that are learned only for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle
from paddle import nn

from paddlenlp_nebula.distill.losses import divergence, hidden
from paddlenlp_nebula.distill.losses.divergence import SoftLabels, mean
from paddlenlp_nebula.distill.losses.relations import relation_kl
from paddlenlp_nebula.distill.losses.spec import Term
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.precision import full_precision
from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.tensors import Tensor

__all__ = ["Objective"]


class Objective(nn.Layer):
    """A sum of terms.

    Names of layers' outputs, on both sides: ``hidden.L``; ``q.L``, ``k.L``, ``v.L`` (heads side by side).

    Args:
        terms: see `spec`.
        student_width: of the student's hidden states.
        teacher_width: of the teacher's as they arrive; 0 for both where no term is about hidden states.

    Attributes:
        terms: as given.
        projections: one `Projection` for each pair of layers that a term compares, shared by terms; its parameters
            belong to the optimizer, and into checkpoints, but not into the student that is saved.
    """

    def __init__(self, terms: Sequence[Term], student_width: int = 0, teacher_width: int = 0) -> None:
        super().__init__()
        self.terms = tuple(terms)
        pairs = sorted({pair for term in self.terms if term.needs == "hidden" for pair in term.layers})
        self.projections = nn.LayerDict(
            {_pair(pair): hidden.Projection(student_width, teacher_width) for pair in pairs}
        )

    @full_precision
    def forward(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor | SoftLabels],
        places: Places,
        labels: Tensor | None,
        progress: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch.

        Args:
            student: its ``logits``, cut to the shared vocabulary, and layers' outputs by name, shape
                (samples, length, ...) each.
            teacher: ``logits`` (soft labels, or all of them) and layers' outputs, shape (rows, ...) each.
            places: where these rows belong.
            labels: of the batch, int64, shape (samples, length), `divergence.IGNORED` where there is none.
            progress: how much of the training is done, from 0 to 1.

        Returns:
            The weighted sum, a float32 scalar, and each term's own value by its label, without weight or gradient.

        Raises:
            NebulaError: something that a term needs is missing.
        """
        total = paddle.zeros([], dtype="float32")
        values = {}
        for term in self.terms:
            value = self._value(term, student, teacher, places, labels)
            values[term.label] = value.detach()
            total = total + term.weight.at(progress) * value
        return total, values

    def _value(
        self,
        term: Term,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor | SoftLabels],
        places: Places,
        labels: Tensor | None,
    ) -> Tensor:
        if term.needs == "labels":
            if labels is None:
                raise NebulaError("the loss 'ce' needs the batch's labels, got none: take it out of distill_loss")
            logits = _get(student, "logits", "student", term)
            return mean(divergence.cross_entropy(logits.flatten(0, -2), labels.flatten()))
        if term.needs == "logits":
            rows = places.rows(_get(student, "logits", "student", term))
            return mean(_DIVERGENCES[term.name](rows, _get(teacher, "logits", "teacher", term), **term.options))
        losses = [self._between(term, pair, student, teacher, places) for pair in term.layers]
        return sum(losses[1:], losses[0]) / len(losses)

    def _between(
        self,
        term: Term,
        pair: tuple[int, int],
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor | SoftLabels],
        places: Places,
    ) -> Tensor:
        """A loss between two layers, a scalar."""
        theirs, own = pair
        if term.needs == "relations":
            kinds = [
                relation_kl(
                    _get(student, f"{kind}.{own}", "student", term),
                    places.spread(_get(teacher, f"{kind}.{theirs}", "teacher", term)),
                    places,
                    int(term.options["heads"]),
                )
                for kind in "qkv"
            ]
            return mean(kinds[0] + kinds[1] + kinds[2])
        rows = places.rows(_get(student, f"hidden.{own}", "student", term))
        distance = hidden.squared_error if term.name == "hidden_mse" else hidden.cosine
        return mean(distance(self.projections[_pair(pair)](rows), _get(teacher, f"hidden.{theirs}", "teacher", term)))


_DIVERGENCES = {"kl": divergence.kl, "reverse_kl": divergence.reverse_kl, "jsd": divergence.jensen_shannon}


def _pair(pair: tuple[int, int]) -> str:
    return f"teacher_{pair[0]}_student_{pair[1]}"


def _get(outputs: Mapping[str, Tensor], name: str, whose: str, term: Term) -> Tensor:
    if name not in outputs:
        raise NebulaError(
            f"the loss {term.label!r} needs {name!r} of the {whose}, got {', '.join(outputs) or 'nothing'}: "
            "does the knowledge that is asked for contain it?"
        )
    return outputs[name]
