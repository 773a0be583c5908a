"""``nebula launch``: the user's own script, once per cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

import click

from paddlenlp_nebula.cli.sites import hyphens, roster_here, site_options
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.launch.lines import COLOURS, LineWriter, RefusalFinder
from paddlenlp_nebula.launch.roster import Roster, paddle_command, split_devices, thread_variables
from paddlenlp_nebula.launch.supervisor import Cluster, Outcome, Supervisor, exit_code

__all__ = ["launch"]

_FIELDS = {"--cluster", "--clusters", "--rendezvous"}  # of NebulaArguments, which the script may take, too


@click.command(context_settings={"allow_interspersed_args": False, "token_normalize_func": hyphens})
@site_options
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write each cluster's output to DIR/CLUSTER/cluster.log (with several processes per cluster: one log each, "
    "under log/CLUSTER by default).",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    local_clusters: int | None,
    cluster: str | None,
    clusters: str | None,
    rendezvous: str | None,
    processes_per_cluster: int,
    grace_s: float,
    log_dir: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT once per cluster, with the variables set by which NebulaArguments finds the others.

    In ARGUMENTS, {cluster} stands for the cluster's name. Clusters must not write to one directory, so a typical
    call on one machine is

    \b
        nebula launch --local-clusters 2 train.py --output_dir out/{cluster}

    and on the site "west", with the same names and address as on the site "east",

    \b
        nebula launch --cluster west --clusters west,east \\
            --rendezvous west.example.org:29400 train.py

    A cluster that fails is reported and the others go on as their sync_on_loss says; the exit code is then not 0.
    """
    misplaced = _misplaced(script, arguments)
    try:
        roster, here = roster_here(local_clusters, cluster, clusters, rendezvous)
    except ConfigurationError as error:
        raise ConfigurationError([*error.problems, *misplaced.values()]) from None
    for option in misplaced.keys() - _FIELDS:
        click.secho(f"nebula: {misplaced[option]}", fg="yellow", err=True)
    if len(here) > 1:
        _warn_of_shared_output_dir(arguments)
    jobs = [
        Cluster(
            name,
            paddle_command(
                script,
                [argument.replace("{cluster}", name) for argument in arguments],
                processes_per_cluster,
                (log_dir or Path("log")) / name,
            ),
            _environment(roster, name, here, processes_per_cluster),
        )
        for name in here
    ]
    if cluster is not None and log_dir is None:
        # Nothing to supervise: become the cluster, so that signals and exit code are its own.
        sys.stdout.flush()
        os.execvpe(jobs[0].command[0], list(jobs[0].command), dict(jobs[0].environment))
    click.echo(f"nebula: starting {', '.join(here)}; they meet at {roster.rendezvous}", err=True)
    sys.exit(_supervise(jobs, grace_s, log_dir))


def _misplaced(script: str, arguments: Sequence[str]) -> dict[str, str]:
    """Options of ours behind the script -> a sentence about each."""
    given = {hyphens(argument.partition("=")[0]) for argument in arguments}
    ours = (option for parameter in launch.params for option in parameter.opts if option.startswith("--"))
    return {
        option: f"{option} stands behind {script}, so it is the script's: if `nebula launch` is meant, write it before"
        for option in ours
        if option in given
    }


def _warn_of_shared_output_dir(arguments: Sequence[str]) -> None:
    """Two clusters that write to one place destroy each other's checkpoints without a word.

    A warning only: a script may well add the cluster's name itself.
    """
    for position, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        value = value or next(iter(arguments[position + 1 :]), "")
        if option == "--output_dir" and value and "{cluster}" not in value:
            better = f"--output_dir {value.rstrip('/')}/{{cluster}}"
            click.secho(
                f"nebula: all clusters are given {option} {value}; unless the script tells them apart, write {better}",
                fg="yellow",
                err=True,
            )


def _environment(roster: Roster, name: str, here: Sequence[str], processes: int) -> dict[str, str]:
    environment = {**os.environ, **roster.environment(name)}
    if len(here) > 1:
        environment |= thread_variables(len(here) * processes, os.environ)
        environment |= split_devices(here.index(name), len(here), os.environ)
    return environment


def _supervise(jobs: Sequence[Cluster], grace_s: float, log_dir: Path | None) -> int:
    width = max(len(job.name) for job in jobs)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    writers: dict[str, LineWriter] = {}
    logs: dict[str, IO[bytes]] = {}

    finders = {job.name: RefusalFinder() for job in jobs}

    def write(name: str, label: str, line: str) -> None:
        try:
            sys.stdout.write(line)
            sys.stdout.flush()
        except BrokenPipeError:
            if supervisor.interrupted_by is None:
                raise
            # Ctrl-C has also ended the `tee` behind us: that must not cut short what clusters still have to save.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finders[name].see(line.removeprefix(label).removesuffix("\n"))

    def on_output(name: str, data: bytes) -> None:
        if name in logs:
            logs[name].write(data)
        if data:
            writers[name].feed(data)
        else:
            writers[name].close()

    def on_exit(outcome: Outcome) -> None:
        rest = ", ".join(job.name for job in jobs if job.name not in ended and job.name != outcome.name)
        ended.add(outcome.name)
        if not outcome.ok and supervisor.interrupted_by is None:
            click.secho(f"nebula: {outcome}{f'; {rest} may go on' if rest else ''}", fg="red", err=True)

    ended: set[str] = set()
    with ExitStack() as files:
        for position, job in enumerate(jobs):
            label = f"{job.name:<{width}} | "
            if coloured:
                label = click.style(label, fg=COLOURS[position % len(COLOURS)])
            writers[job.name] = LineWriter(label, partial(write, job.name, label))
            if log_dir is not None:
                (log_dir / job.name).mkdir(parents=True, exist_ok=True)
                logs[job.name] = files.enter_context(open(log_dir / job.name / "cluster.log", "wb", buffering=0))
        supervisor = Supervisor(jobs, grace_s=grace_s, on_output=on_output, on_exit=on_exit)
        outcomes = supervisor.run()
    if supervisor.interrupted_by is not None:
        click.secho(f"nebula: ended early by {signal.Signals(supervisor.interrupted_by).name}", fg="yellow", err=True)
        return exit_code(outcomes, supervisor.interrupted_by)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed and len(jobs) > 1:
        click.secho(f"nebula: failed: {'; '.join(map(str, failed))}", fg="red", err=True)
    # Clusters refuse with the same words, which would be lost above what else they print.
    for refusal in dict.fromkeys(finders[outcome.name].refusal for outcome in failed):
        if refusal:
            click.secho(f"nebula: {refusal}", fg="red", err=True)
    return exit_code(outcomes)
