"""``nebula data``."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from paddlenlp_nebula.cli.data import data
from tests.data.help_folder import make_help_folder


def test_builds_and_tells_what_it_built(tmp_path: Path) -> None:
    source = make_help_folder(tmp_path / "source")
    words = ["libreoffice-help-sections", "--from", str(source), "--cache", str(tmp_path / "cache")]
    done = CliRunner().invoke(data, words)
    assert done.exit_code == 0, done.output
    assert (
        done.stderr
        == "libreoffice-help-sections: looking in the cache, else fetching and extracting, which can take minutes...\n"
    )
    assert "MPL-2.0" in done.stdout
    assert "train" in done.output
    assert (tmp_path / "cache" / "libreoffice-help-sections" / "train.tsv").is_file()


def test_errors_are_one_line_and_fail(tmp_path: Path) -> None:
    done = CliRunner().invoke(data, ["minilm-l6", "--from", str(tmp_path), "--cache", str(tmp_path / "cache")])
    assert done.exit_code == 1
    assert "found none" in done.output
    assert "Traceback" not in done.output


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    for words in (["minilm-l6", "--output", str(tmp_path)], ["minilm-l6", "--langs", "de"], ["everything"]):
        assert CliRunner().invoke(data, words).exit_code == 2
