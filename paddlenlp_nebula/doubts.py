"""Settings that are allowed, but have no effect beside the others or may well not do what was meant: said at the start."""

from __future__ import annotations

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.codec.registry import codec_from_spec
from paddlenlp_nebula.codec.topk import TopK

__all__ = ["doubts"]

STALE_STEPS = 250
"""Optimizer steps between two times that an element is sent, from which on LoRA's loss swings: see `doubts`."""

# Settings that act on what a codec leaves unsent, and their defaults: where it leaves nothing, and where it keeps that itself.
_WITHOUT_LOSS = {"sync_feedback_decay": 1.0, "sync_keep_unsent": False, "sync_final_codec": None}
_OWN_FEEDBACK = {"sync_error_feedback": True, "sync_feedback_decay": 1.0}


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
    idle = _WITHOUT_LOSS if codec.lossless else _OWN_FEEDBACK if codec.own_feedback else {}
    reason = "leaves nothing unsent" if codec.lossless else "keeps what is unsent by rules of its own"
    found += [
        f"{name}={value} has no effect: sync_codec={nebula.sync_codec!r} {reason}"
        for name, default in idle.items()
        if (value := getattr(nebula, name)) != default
    ]
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
