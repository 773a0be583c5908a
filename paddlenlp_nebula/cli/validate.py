"""``nebula validate``: everything that is wrong with recipes, before anything starts."""

from __future__ import annotations

import sys
import warnings
from itertools import takewhile

import click

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.recipe.source import find_recipe

__all__ = ["validate"]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipes", nargs=-1, required=True, type=click.UNPROCESSED, metavar="RECIPE... [OVERRIDES]...")
def validate(recipes: tuple[str, ...]) -> None:
    """Check each RECIPE (a file, or the name of a shipped one) as `nebula run` would, and start nothing.

    \b
        nebula validate finetune_lora
        nebula validate job.yaml --max_steps 100 --sync_codec bf16    # with OVERRIDES of its keys
    """
    names = list(takewhile(lambda word: not word.startswith("--"), recipes))
    overrides = recipes[len(names) :]
    if not names:
        raise click.UsageError(f"a recipe must be named in front of {overrides[0]}")
    bad = 0
    there = []
    for name in names:
        try:
            find_recipe(name)
            there.append(name)
        except ConfigurationError as error:
            bad += 1
            _show(name, error)
    if not there:
        sys.exit(1)
    click.echo("checking...", err=True)
    # Paddle is imported from here on, which takes seconds; what it has to say about compilers is not asked for.
    warnings.simplefilter("ignore")
    from paddlenlp.utils.log import logger

    from paddlenlp_nebula.recipe.config import load_configuration

    logger.set_level("ERROR")
    for name in there:
        try:
            configuration = load_configuration(name, overrides, any_site=True)
        except ConfigurationError as error:
            bad += 1
            _show(name, error)
        else:
            click.echo(f"{click.style(name, bold=True)}: fine ({configuration.recipe.name})")
    sys.exit(1 if bad else 0)


def _show(name: str, error: ConfigurationError) -> None:
    click.echo(f"{click.style(name, bold=True)}: {click.style(str(error), fg='red')}")
