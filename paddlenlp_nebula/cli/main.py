"""Entry point of ``nebula``. Subcommands are imported when they are called, so that help is instant."""

from __future__ import annotations

import errno
import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from paddlenlp_nebula import __version__
from paddlenlp_nebula.errors import NebulaError

__all__ = ["main"]

# section -> command -> (module that holds a click command of the same name, one line of help)
_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "run": ("paddlenlp_nebula.cli.run", "Run a recipe on clusters of this machine, or on this site."),
        "launch": ("paddlenlp_nebula.cli.launch", "Start your own training script once per cluster."),
    },
    "Prepare": {
        "validate": ("paddlenlp_nebula.cli.validate", "Check recipes and show everything that is wrong with them."),
        "keygen": ("paddlenlp_nebula.cli.keygen", "Make the keys and certificates by which clusters know each other."),
        "trust": ("paddlenlp_nebula.cli.trust", "Look at certificates, sign requests for them, trust another CA."),
        "doctor": ("paddlenlp_nebula.cli.doctor", "Show what this machine offers and what is missing."),
        "data": ("paddlenlp_nebula.cli.data", "Prepare the data sets that the shipped recipes use."),
    },
    "Hand on": {
        "sign": ("paddlenlp_nebula.cli.sign", "Sign adapters or a checkpoint for others."),
        "verify": ("paddlenlp_nebula.cli.sign", "Check who has signed a folder, and that nothing in it has changed."),
    },
    "Measure": {
        "bench": ("paddlenlp_nebula.cli.bench", "Measure links and codecs."),
    },
}
_COMMANDS = {name: entry for section in _SECTIONS.values() for name, entry in section.items()}


class _UserError(click.ClickException):
    """An error of ours or of the system's, shown as a message instead of a traceback."""

    exit_code = 2


@contextmanager
def _unwinding() -> Iterator[None]:
    """Have SIGTERM and a closed terminal end a command as Ctrl-C does: what it has made, keys among it, is removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = []
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class _LazyGroup(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(import_module(_COMMANDS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if words[0] not in _COMMANDS and (close := get_close_matches(words[0], _COMMANDS, n=1)):
            context.fail(f"there is no command {words[0]!r}: did you mean {close[0]}?")
        return super().resolve_command(context, words)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in _SECTIONS.items():
            with formatter.section(click.style(title, bold=True)):
                formatter.write_dl([(click.style(name, fg="cyan"), text) for name, (_, text) in section.items()])

    def invoke(self, context: click.Context) -> Any:
        try:
            with _unwinding():
                return super().invoke(context)
        except NebulaError as error:
            raise _UserError(str(error)) from None
        except OSError as error:  # a folder that cannot be made, a full disk
            if error.errno == errno.EPIPE:  # the reader of our output has gone: click ends quietly
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise _UserError(f"{where}{error.strerror or error}") from None


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Try it on this machine:  nebula run finetune_lora --local-clusters 2",
)
@click.version_option(__version__, prog_name="nebula")
def main() -> None:
    """Train one PaddleNLP model on several clusters over slow wide-area links."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a progress bar on a terminal without its characters ends no training
