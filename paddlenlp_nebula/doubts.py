"""Settings that are allowed, but have no effect beside the others or may well not do what was meant: said at the start."""

from __future__ import annotations

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.codec.topk import TopK

__all__ = ["doubts"]

STALE_STEPS = 250
"""Optimizer steps between two times that an element is sent, from which on LoRA's loss swings: see `doubts`."""


def doubts(nebula: NebulaArguments) -> list[str]:
    """A sentence for each doubtful setting; a recipe's under another strategy, say, is no mistake.

    Top-k under ``local_steps`` sends each element about once in ``sync_every * CHUNK / K`` steps. Each round begins anew
    without what is unsent, so until then the same change is computed, and added to the error, several times over; when
    it is sent it overshoots, and in LoRA A and B overshoot together. `STALE_STEPS` is from a small task (our own; figures in
    docs/strategies.md, test in tests/adapters/test_sparse_feedback.py).
    """
    found = []
    if nebula.sync_strategy == "every_step" and nebula.sync_every != "30":
        found.append(f"sync_every={nebula.sync_every} has no effect: sync_strategy='every_step' exchanges at each step")
    codec = codec_from_spec(nebula.sync_codec)
    if nebula.sync_feedback_decay != 1 and codec.lossless:
        found.append(
            f"sync_feedback_decay={nebula.sync_feedback_decay:g} has no effect: sync_codec={nebula.sync_codec!r} leaves "
            "nothing unsent"
        )
    remembers = nebula.sync_strategy == "local_steps" and nebula.sync_error_feedback and not nebula.sync_keep_unsent
    if remembers and nebula.sync_parameters == "adapters" and isinstance(codec, TopK):
        steps = nebula.pace.last * codec.chunk // codec.kept
        if steps > STALE_STEPS and nebula.sync_feedback_decay > 0.8:
            found.append(
                f"sync_codec={nebula.sync_codec!r} with sync_every={nebula.sync_every} sends each element of the adapters "
                f"about once in {steps} steps, and its change is computed several times over until then, so that the loss "
                "may swing: set sync_keep_unsent, or else sync_feedback_decay to 0.8 at most"
            )
    return found
