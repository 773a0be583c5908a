"""The closed table of what ``nebula data`` can build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_nebula.data.libreoffice import build_help
from paddlenlp_nebula.data.minilm import build_minilm
from paddlenlp_nebula.data.pairs import build_pairs
from paddlenlp_nebula.data.sections import build_sections

__all__ = ["DATA_SETS", "SAMPLES", "Request"]


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Args:
        from_dir: use this folder instead of fetching.
        cache: cache folder, see ``paddlenlp_nebula.data.cache.cache_root``.
        languages: for ``libreoffice-help``.
        output: for those of ``SAMPLES``: write the sample that comes with the package here, nothing into the cache.
    """

    from_dir: Path | None = None
    cache: Path | None = None
    languages: Sequence[str] = ("en-us",)
    output: Path | None = None


# Name -> builder of its folder. A builder returns at once when the cache has the folder already.
DATA_SETS: dict[str, Callable[[Request], Path]] = {
    "libreoffice-help": lambda r: build_help(r.languages, cache=r.cache, from_dir=r.from_dir),
    "libreoffice-help-en-de": lambda r: build_pairs(cache=r.cache, from_dir=r.from_dir, output=r.output),
    "libreoffice-help-sections": lambda r: build_sections(cache=r.cache, from_dir=r.from_dir, output=r.output),
    "minilm-l6": lambda r: build_minilm(cache=r.cache, from_dir=r.from_dir),
}

# Those of which the package brings a sample.
SAMPLES = ("libreoffice-help-en-de", "libreoffice-help-sections")
