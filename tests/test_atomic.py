"""A file is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_nebula.atomic import replacing


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for text in ("old", "new"):
        with replacing(path) as partial:
            partial.write_text(text)
            assert partial.parent == path.parent  # or it could not take its place at once
            assert (path.read_text() if path.exists() else None) == ("old" if text == "new" else None)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_nothing_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
