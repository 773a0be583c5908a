"""A teacher made of a PaddleNLP model: what it offers, and how it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddlenlp_nebula.distill.extract import tell
from paddlenlp_nebula.distill.identity import teacher_fingerprint, tokenizer_fingerprint
from paddlenlp_nebula.distill.knowledge.knowledge import Arrays
from paddlenlp_nebula.distill.knowledge.vectors import Hidden
from paddlenlp_nebula.distill.offer import Offer
from paddlenlp_nebula.distill.places import Places
from paddlenlp_nebula.distill.service import Batch
from paddlenlp_nebula.errors import NebulaError

__all__ = ["answer_by", "offer_of"]


def offer_of(model: Any, tokenizer: Any, *, longest: int, knowledge: str = "", places: str = "attention_mask") -> Offer:
    """What a model can be asked for: ``logits``, ``labels`` and ``hidden``.

    Args:
        model: one of PaddleNLP's.
        tokenizer: that its ids are of.
        longest: tokens of a sample that it takes.
        knowledge: the only one that it is to tell; "" for any of these.
        places: the input that says which positions count; "" for one answer for each sample (a classifier).
    """
    config = model.config
    return Offer(
        teacher=teacher_fingerprint(model),
        tokenizer=tokenizer_fingerprint(tokenizer),
        tokens=len(tokenizer),
        vocabulary=len(tokenizer) if places else int(config.num_labels),
        knowledge=knowledge,
        width=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        longest=longest,
    )


def answer_by(model: Any, places: str = "attention_mask") -> Callable[[Batch], Arrays]:
    """The function that a `Service` answers with.

    Args:
        model: called with a batch's inputs by name; put into its evaluation mode.
        places: as for `offer_of`.
    """
    model.eval()

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def answer(batch: Batch) -> Arrays:
        inputs = {name: paddle.to_tensor(array) for name, array in batch.inputs.items()}
        outputs = model(**inputs, return_dict=True, output_hidden_states=_wants_layers(batch))
        logits = outputs.get("logits")
        if logits is None or logits.shape[-1] < batch.extent.vocabulary:
            raise NebulaError(
                f"a teacher's model must give logits of at least {batch.extent.vocabulary} tokens or classes, got "
                f"{'none' if logits is None else logits.shape[-1]}"
            )
        found = {"logits": logits[..., : batch.extent.vocabulary]}
        found |= {f"hidden.{layer}": state for layer, state in enumerate(outputs.get("hidden_states") or ())}
        mask = batch.inputs[places] if places else np.ones(batch.extent.samples)
        return tell(batch.kinds, found, Places.of(mask, batch.name))

    found: Callable[[Batch], Arrays] = answer
    return found


def _wants_layers(batch: Batch) -> bool:
    return any(isinstance(kind, Hidden) for kind in batch.kinds)
