"""MiniLM-L6 in PaddleNLP's format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paddlenlp_nebula.data import minilm
from paddlenlp_nebula.data.cache import Manifest
from paddlenlp_nebula.data.clients import DataUnavailable
from paddlenlp_nebula.data.minilm import PARAMETERS, build_minilm

installed = pytest.mark.skipif(
    minilm._installed_folder() is None, reason=f"the package {minilm.PACKAGE} {minilm.VERSION} is not installed"
)


@installed
def test_the_package_is_found_without_importing_it() -> None:
    code = (
        "import sys; from paddlenlp_nebula.data import minilm; print(minilm._installed_folder());"
        "assert not {'torch', 'paddle', minilm.MODULE} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip(), "model.safetensors").is_file()


@installed
def test_conversion_keeps_every_weight(tmp_path: Path) -> None:
    from paddlenlp.transformers import BertModel
    from safetensors.numpy import load_file

    source = minilm._installed_folder()
    assert source is not None
    before = sorted(path.name for path in source.iterdir())
    folder = build_minilm(cache=tmp_path)
    assert sorted(path.name for path in source.iterdir()) == before
    assert Manifest.read(folder).counts["parameters"] == PARAMETERS
    original = load_file(source / "model.safetensors")
    model = BertModel.from_pretrained(str(folder))
    assert (model.embeddings.word_embeddings.weight.numpy() == original["embeddings.word_embeddings.weight"]).all()
    last = model.encoder.layers[5].linear2.weight.numpy()  # Paddle keeps linear weights transposed
    assert (last == original["encoder.layer.5.output.dense.weight"].T).all()


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="found none"):
        build_minilm(cache=tmp_path / "cache", from_dir=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(DataUnavailable, match="sha256 53aa5117"):
        build_minilm(cache=tmp_path / "cache", from_dir=tmp_path)
