"""One vocabulary, two output layers: models pad theirs to different widths (152,064 and 151,936, for example)."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["Side", "shared_vocabulary"]


@dataclass(frozen=True)
class Side:
    """A model and its tokenizer, as far as their sizes go.

    Attributes:
        tokens: that the tokenizer knows, added ones included (``len(tokenizer)``).
        width: of the model's logits; what is beyond the tokens is padding.
    """

    tokens: int
    width: int


def shared_vocabulary(teacher: Side, student: Side) -> int:
    """How many of the first logits of both models are about the same tokens; the rest is padding and is cut off.

    That the tokens are the same ones, too, is what the tokenizers' fingerprints say (`identity`).

    Raises:
        ConfigurationError: the tokenizers differ in size, or a model has fewer logits than tokens.
    """
    problems = [
        f"the {name}'s logits must be at least as many as its tokenizer's {side.tokens} tokens, got {side.width}: "
        "resize its embeddings"
        for name, side in (("teacher", teacher), ("student", student))
        if side.width < side.tokens
    ]
    if teacher.tokens != student.tokens:
        problems.append(
            f"teacher and student must have one tokenizer, got one of {teacher.tokens} tokens (teacher) and one of "
            f"{student.tokens} (student): for different ones use the knowledge 'hidden', 'sequence' or 'labels'"
        )
    if problems:
        raise ConfigurationError(problems)
    return teacher.tokens
