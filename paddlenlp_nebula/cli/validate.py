"""``nebula validate``: everything that is wrong with recipes, before anything starts."""

from __future__ import annotations

import sys
import warnings

import click

from paddlenlp_nebula.errors import ConfigurationError

__all__ = ["validate"]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
def validate(recipes: tuple[str, ...]) -> None:
    """Check each RECIPE (a file, or the name of a shipped one) as `nebula run` would, and start nothing."""
    click.echo("checking...", err=True)
    # Paddle is imported from here on, which takes seconds; what it has to say about compilers is not asked for.
    warnings.simplefilter("ignore")
    from paddlenlp.utils.log import logger

    from paddlenlp_nebula.recipe.config import load_configuration

    logger.set_level("ERROR")
    bad = 0
    for recipe in recipes:
        try:
            configuration = load_configuration(recipe, any_site=True)
        except ConfigurationError as error:
            bad += 1
            click.echo(f"{click.style(recipe, bold=True)}: {click.style(str(error), fg='red')}")
        else:
            click.echo(f"{click.style(recipe, bold=True)}: fine ({configuration.recipe.name})")
    sys.exit(1 if bad else 0)
