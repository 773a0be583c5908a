"""The documentation does what it says: Python compiles, imports and runs, commands are understood."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paddlenlp_nebula.cli.main import main
from paddlenlp_nebula.cli.sites import roster_here
from paddlenlp_nebula.errors import ConfigurationError
from tests.docs.pages import REPO, Command, Snippet, commands, pages, snippets

SNIPPETS, COMMANDS = snippets(), commands("nebula")


def test_the_documentation_is_found() -> None:
    assert len(pages()) >= 7
    assert len(SNIPPETS) >= 3
    assert sum(snippet.mark == "run" for snippet in SNIPPETS) >= 1
    assert len(COMMANDS) >= 15
    assert {command.words[0] for command in COMMANDS} >= {"run", "launch", "validate", "data", "doctor"}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.place)
def test_python_compiles_and_its_imports_exist(snippet: Snippet) -> None:
    tree = ast.parse(snippet.text, snippet.place)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            assert not [name.name for name in node.names if not hasattr(module, name.name)]
        elif isinstance(node, ast.Import):
            for name in node.names:
                import_module(name.name)


def _runs() -> list[Snippet]:
    """Marked ones, each with what continues it: a block that is continued need not run twice."""
    chains: list[Snippet] = []
    for snippet in SNIPPETS:
        if snippet.mark == "continue":
            chains[-1] = snippet
        else:
            chains.append(snippet)
    return [chain for chain in chains if chain.mark]


@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("snippet", _runs(), ids=lambda snippet: snippet.place)
def test_python_marked_run_trains_on_two_clusters(snippet: Snippet, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(snippet.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "paddlenlp_nebula.cli", "launch", "--local-clusters", "2", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    for name in ("west", "east"):
        assert re.search(rf"^{name} .*rounds with west, east", done.stdout, re.MULTILINE)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory like a clone's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPO / "recipes")
    return tmp_path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Takes note of commands and their parameters, in place of carrying them out."""
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        click.Command, "invoke", lambda self, context: calls.append((str(context.info_name), context.params))
    )
    return calls


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.place} {' '.join(command.words)}")
def test_commands_are_understood(command: Command, directory: Path, parsed: list[tuple[str, dict[str, Any]]]) -> None:
    invented = _invent_files(command, directory)
    result = CliRunner().invoke(main, command.words)
    assert result.exit_code == 0, result.output
    name, values = parsed[-1]
    if name in ("run", "launch") and (values["cluster"] is None or values["rendezvous"]):
        with click.Context(main):  # throws the certificates of local clusters away
            roster_here(values["local_clusters"], values["cluster"], values["clusters"], values["rendezvous"])
    if name == "run":
        assert not _wrong_keys(values["recipe"], values["overrides"], invented)


def _invent_files(command: Command, directory: Path) -> set[str]:
    """Make the reader's own files that the command names."""
    contents = {".py": "", ".json": "{}", ".yaml": "recipe: classify\n", ".csr": "", ".pem": "", ".key": ""}
    own = {word for word in command.words if Path(word).suffix in contents and not (directory / word).exists()}
    for word in own:
        (directory / word).parent.mkdir(parents=True, exist_ok=True)
        (directory / word).write_text(contents[Path(word).suffix])
    if command.words[0] in ("sign", "verify"):
        (directory / command.words[1]).mkdir(parents=True)
    return own


def _wrong_keys(recipe: str, overrides: tuple[str, ...], invented: set[str]) -> list[str]:
    """What is wrong with a recipe and its overrides; of an invented one only the keys that do not exist."""
    from paddlenlp_nebula.recipe.config import load_configuration

    try:
        load_configuration(recipe, overrides, any_site=True)
    except ConfigurationError as error:
        return [problem for problem in error.problems if recipe not in invented or "is not a key" in problem]
    return []


@pytest.mark.parametrize("words", [["rnu", "x.yaml"], ["run", "x.yaml", "--lcal-clusters", "2"], ["doctor", "--fast"]])
def test_wrong_commands_would_be_noticed(
    words: list[str], directory: Path, parsed: list[tuple[str, dict[str, Any]]]
) -> None:
    command = Command("here", tuple(words))
    _invent_files(command, directory)
    failed = CliRunner().invoke(main, words).exit_code != 0
    assert failed or _wrong_keys(parsed[-1][1]["recipe"], parsed[-1][1]["overrides"], {"x.yaml"})


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    named = {word for command in commands("make") for word in command.words if re.fullmatch(r"[a-z-]+", word)}
    assert named
    assert named <= targets
