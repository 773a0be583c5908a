"""The command as a whole: instant help, sections, versions, errors without tracebacks."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

import paddlenlp_nebula
import paddlenlp_nebula.cli.doctor as doctor_module
from paddlenlp_nebula.cli.main import main

pytestmark = pytest.mark.timeout(60)


def test_help_is_instant_and_lists_every_command() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "paddlenlp_nebula.cli", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # its computing, whoever else uses the machine: about 0.1 s
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert done.returncode == 0
    for word in ("Train:", "run", "launch", "validate", "keygen", "trust", "doctor", "data", "sign", "verify", "bench"):
        assert word in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from paddlenlp_nebula.cli.main import main\n"
        "for words in (['--help'], ['launch', '--help'], ['run', '--help'], ['validate', '--help'], ['doctor', '--help'],\n"
        "              ['keygen', 'cluster', '--help'], ['trust', '--help'], ['verify', '--help']):\n"
        "    result = CliRunner().invoke(main, words); assert result.exit_code == 0, result.output\n"
        "print(sorted({'paddle', 'paddlenlp', 'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_version() -> None:
    assert paddlenlp_nebula.__version__ in CliRunner().invoke(main, ["--version"]).output


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["lunch"])
    assert result.exit_code == 2
    assert "'lunch': did you mean launch?" in result.output
    assert "No such command 'xyz'" in CliRunner().invoke(main, ["xyz"]).output


@pytest.mark.timeout(180)  # imports Paddle
def test_validate_takes_overrides_and_says_what_is_wrong_with_them() -> None:
    fine = CliRunner().invoke(main, ["validate", "finetune_lora", "--max_steps", "5", "--no_lora", "--device", "cpu"])
    assert (fine.exit_code, fine.output.splitlines()[-1]) == (0, "finetune_lora: fine (classify)")
    bad = CliRunner().invoke(main, ["validate", "finetune_lora", "pretrain_local_steps", "--max_stps", "5"])
    assert bad.exit_code == 1
    assert bad.output.count("max_stps is not a key of this recipe (command line): did you mean max_steps?") == 2
    assert CliRunner().invoke(main, ["validate", "--max_steps", "5"]).exit_code == 2


def test_validate_names_a_missing_recipe_without_loading_paddle() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from paddlenlp_nebula.cli.main import main\n"
        "result = CliRunner().invoke(main, ['validate', 'finetune_lroa']); assert result.exit_code == 1\n"
        "assert \"did you mean 'finetune_lora'\" in result.output; print('paddle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_doctor_says_what_to_do_without_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(doctor_module, "_ask", lambda code: ("fine", True))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "no mpiexec next to /nowhere/python or on PATH" in result.output
    assert "pip install mpich" in result.output


def test_doctor_reports_an_import_that_fails() -> None:
    assert doctor_module._ask("raise ImportError('no such thing')") == ("ImportError: no such thing", False)
    assert doctor_module._ask("print('\"yes\"')") == ("yes", True)
