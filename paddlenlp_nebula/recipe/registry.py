"""The recipes that exist. The list is closed: a recipe file names one of these, never code."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddlenlp_nebula.arguments import NebulaArguments

__all__ = ["RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One kind of job.

    Args:
        name: what the key ``recipe`` of a recipe file says.
        summary: one line for listings.
        module: holds ``argument_classes()``, the dataclasses whose fields are the file's keys (besides
            NebulaArguments'), and ``run(arguments, nebula)``, which is called in every process of a cluster
            with one instance of each class. ``run(..., alone=True)`` trains on this cluster's share without
            any exchange. It may hold ``problems(arguments, nebula)``: what does not go together, a sentence each.
            Imported only when needed: it needs Paddle, which takes seconds.
    """

    name: str
    summary: str
    module: str

    def argument_classes(self) -> tuple[type, ...]:
        """The dataclasses that the recipe's keys fill, one of them PaddleNLP's TrainingArguments."""
        classes: tuple[type, ...] = tuple(import_module(self.module).argument_classes())
        return classes

    def problems(self, arguments: tuple[Any, ...], nebula: NebulaArguments) -> list[str]:
        """What each class by itself cannot see to be wrong: a sentence each."""
        look = getattr(import_module(self.module), "problems", None)
        return [] if look is None else list(look(arguments, nebula))

    def run(self, arguments: tuple[Any, ...], nebula: NebulaArguments, *, alone: bool = False) -> None:
        """Train, in this process."""
        run = import_module(self.module).run
        if alone:
            run(arguments, nebula, alone=True)
        else:
            run(arguments, nebula)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "classify",
            "fine-tune an encoder with LoRA as a classifier of sentences",
            "paddlenlp_nebula.recipe.classify",
        ),
        Recipe(
            "distill",
            "teach a small classifier of sentences by a large one on another cluster",
            "paddlenlp_nebula.recipe.distill",
        ),
        Recipe(
            "pretrain",
            "pre-train a small causal language model on bytes of text",
            "paddlenlp_nebula.recipe.pretrain",
        ),
        Recipe(
            "sft",
            "supervised fine-tuning from a PaddleNLP user's own flat JSON file",
            "paddlenlp_nebula.recipe.sft",
        ),
        Recipe(
            "translate",
            "train a small T5 from scratch to translate",
            "paddlenlp_nebula.recipe.translate",
        ),
    )
}
