"""LibreOffice help in several languages: text blocks, and sentence pairs aligned by the pages' own ids."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish
from paddlenlp_nebula.data.clients import DataUnavailable, run_client
from paddlenlp_nebula.data.help_pages import Block, is_sentence, read_blocks

__all__ = ["LANGUAGES", "LICENCE", "HelpPages", "build_help", "open_help_pages"]

LICENCE = "MPL-2.0 (some pages include material under Apache-2.0)"

# Language as in the package's name -> (folder of its pages, fewest blocks or, beside English, sentence pairs that a
# complete package gives). Another release of the help moves the counts a little; a broken extraction moves them a lot.
LANGUAGES = {"en-us": ("en-US", 30_000), "de": ("de", 18_000), "fr": ("fr", 18_000), "zh-cn": ("zh-CN", 12_000)}


@dataclass(frozen=True)
class HelpPages:
    """Unpacked help pages.

    Args:
        text_dirs: folder of the pages, by language.
        version: version of the packages, or "unknown" for a folder that the user gave.
    """

    text_dirs: dict[str, Path]
    version: str


@contextmanager
def open_help_pages(languages: Sequence[str], from_dir: Path | None) -> Iterator[HelpPages]:
    """Give access to the help pages of some languages, fetched unless ``from_dir`` holds them.

    Raises:
        DataUnavailable: if a language is unknown, cannot be fetched, or is not in ``from_dir``.
    """
    if unknown := [language for language in languages if language not in LANGUAGES]:
        raise DataUnavailable(f"languages must be among {', '.join(LANGUAGES)}, got {', '.join(unknown)}")
    if from_dir is not None:
        yield HelpPages({language: _find_text_dir(from_dir, language) for language in languages}, "unknown")
        return
    with tempfile.TemporaryDirectory(prefix="nebula-help-") as name:
        folder = Path(name)
        version = ""
        for language in languages:
            version = _unpack_package(f"libreoffice-help-{language}", folder)
        yield HelpPages({language: _find_text_dir(folder, language) for language in languages}, version)


def _unpack_package(package: str, folder: Path) -> str:
    """Fetch a Debian package, unpack it into ``folder`` without installing it, and return its version."""
    otherwise = "run `apt-get update` first, or unpack the help elsewhere and pass its folder with --from"
    run_client(["apt-get", "download", package], folder=folder, purpose=f"fetch {package}", otherwise=otherwise)
    (archive,) = folder.glob(f"{package}_*.deb")
    run_client(["dpkg-deb", "-x", str(archive), "."], folder=folder, purpose=f"unpack {package}", otherwise=otherwise)
    version = run_client(
        ["dpkg-deb", "-f", str(archive), "Version"], folder=folder, purpose=f"read {package}", otherwise=otherwise
    )
    return version.strip()


def _find_text_dir(folder: Path, language: str) -> Path:
    """The folder with a language's pages, at any depth below ``folder``."""
    wanted = LANGUAGES[language][0]
    candidates = [folder / "text"] if folder.name == wanted else []
    candidates += sorted(folder.rglob(f"{wanted}/text"))
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataUnavailable(
        f"expected the help pages for {language!r} in {folder} (a folder {wanted}/text with .html files), found none; "
        "pass the folder of an unpacked LibreOffice help with --from"
    )


def build_help(languages: Sequence[str], *, cache: Path | None = None, from_dir: Path | None = None) -> Path:
    """Cache the help as TSV and return the folder.

    ``blocks_<language>.tsv`` holds page, id and text of every block; ``pairs_en-us_<language>.tsv`` holds aligned
    sentences, without those left untranslated and without repetitions.

    Args:
        languages: among ``LANGUAGES``; English is always added.
        cache: cache folder, see ``cache_root``.
        from_dir: an unpacked help folder to use instead of fetching; the cached folder is then built anew.
    """
    wanted = ["en-us", *(language for language in dict.fromkeys(languages) if language != "en-us")]

    def build(folder: Path) -> None:
        counts: dict[str, int] = {}
        with open_help_pages(wanted, from_dir) as pages:
            english = list(read_blocks(pages.text_dirs["en-us"]))
            counts["blocks_en-us"] = _write_rows(folder / "blocks_en-us.tsv", english)
            for language in wanted[1:]:
                other = list(read_blocks(pages.text_dirs[language]))
                counts[f"blocks_{language}"] = _write_rows(folder / f"blocks_{language}.tsv", other)
                pairs = align(english, other)
                counts[f"pairs_en-us_{language}"] = _write_rows(folder / f"pairs_en-us_{language}.tsv", pairs)
        _check_counts(counts, wanted)
        Manifest(
            name="libreoffice-help",
            package=", ".join(f"libreoffice-help-{language}" for language in wanted),
            version=pages.version,
            licence=LICENCE,
            counts=counts,
        ).write(folder)

    target = cache_root(cache) / "-".join(["libreoffice-help", *wanted])
    return publish(target, build, replace=from_dir is not None)


def align(english: Sequence[Block], other: Sequence[Block]) -> list[tuple[str, str]]:
    """Sentence pairs: blocks with equal id on equal pages whose English text is a sentence.

    Example:
        >>> align([Block("p", "1", "Press the left key.")], [Block("p", "1", "Drücken Sie die linke Taste.")])
        [('Press the left key.', 'Drücken Sie die linke Taste.')]
    """
    translation = {(block.page, block.key): block.text for block in other}
    pairs = ((block.text, translation.get((block.page, block.key), block.text)) for block in english)
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1] and is_sentence(pair[0])))


def _write_rows(path: Path, rows: Sequence[Sequence[str]]) -> int:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def _check_counts(counts: dict[str, int], languages: Sequence[str]) -> None:
    for language in languages:
        kind = "blocks_en-us" if language == "en-us" else f"pairs_en-us_{language}"
        fewest = LANGUAGES[language][1]
        if counts[kind] < fewest:
            raise DataUnavailable(
                f"expected at least {fewest:,} rows in {kind}, extracted {counts[kind]:,}: the help pages have another "
                "layout than this version knows, or the folder is incomplete"
            )
