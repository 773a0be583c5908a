"""``nebula run``: a recipe on clusters of this machine, or this site's part of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from paddlenlp_nebula.cli.progress import Board
from paddlenlp_nebula.cli.sites import hyphens, roster_here, site_options
from paddlenlp_nebula.errors import ConfigurationError, NebulaError
from paddlenlp_nebula.launch.family import die_with_parent
from paddlenlp_nebula.launch.lines import RefusalFinder
from paddlenlp_nebula.launch.reports import forget_reports
from paddlenlp_nebula.launch.roster import Roster, paddle_command, split_devices, thread_variables
from paddlenlp_nebula.launch.summary import degradations, digests_differ, summary_table
from paddlenlp_nebula.launch.supervisor import Cluster, Outcome, Supervisor, exit_code
from paddlenlp_nebula.recipe.source import Setting, find_recipe, read_recipe

__all__ = ["run"]

_WORKER = Path(__file__).resolve().parent.parent / "recipe" / "worker.py"
_TAIL_LINES = 20


@dataclass(frozen=True)
class _Plan:
    """What to start: a checked recipe, the clusters, and how."""

    recipe: Path
    overrides: tuple[str, ...]
    roster: Roster
    here: tuple[str, ...]
    processes: int
    output_dir: Path
    compare_alone: bool = False

    def cluster(self, name: str, *, alone: bool = False) -> Cluster:
        """The job of one cluster, or of one cluster without the others, which has a directory of its own."""
        directory = self.output_dir / ("alone" if alone else name)
        words = [
            *(["--alone"] if alone else []),
            *(str(self.recipe), *self.overrides),
            *self.roster.overrides(name),
            *("--output_dir", str(directory)),
        ]
        environment = {**os.environ, **self.roster.environment(name)}
        if len(self.here) > 1:
            # Alone, a cluster has all cores, but devices as before.
            environment |= thread_variables((1 if alone else len(self.here)) * self.processes, os.environ)
            environment |= split_devices(self.here.index(name), len(self.here), os.environ)
        command = paddle_command(str(_WORKER), words, self.processes, directory / "processes")
        return Cluster(directory.name, command, environment, log=directory / "cluster.log")


@click.command(context_settings={"ignore_unknown_options": True, "token_normalize_func": hyphens})
@site_options
@click.option(
    "--role",
    type=click.Choice(["teacher", "student"]),
    help="With --cluster, in recipes with a teacher: make sure that this site's cluster is it, or is not.",
)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def run(
    local_clusters: int | None,
    cluster: str | None,
    clusters: str | None,
    rendezvous: str | None,
    processes_per_cluster: int,
    grace_s: float,
    role: str | None,
    recipe: str,
    overrides: tuple[str, ...],
) -> None:
    """Run RECIPE, a flat YAML or JSON file or the name of a shipped one, with OVERRIDES of its keys.

    \b
        nebula run finetune_lora --local-clusters 2 --max_steps 100
        nebula run job.yaml --cluster west --clusters west,east \\
            --rendezvous west.example.org:29400

    --cluster is each site's own name; the other two are the same everywhere and may be keys of the file instead.

    Each cluster writes to OUTPUT_DIR/CLUSTER: nebula_report.json, cluster.log and what the recipe saves.
    """
    if role is not None:
        if cluster is None:
            raise ConfigurationError(
                [f"--role goes with --cluster (on one machine the teacher is first), got {role!r}"]
            )
        overrides = (*overrides, "--role", role)
    console = Console()
    path = find_recipe(recipe)
    if cluster is not None:
        # What is not on the command line may be in the recipe, the same file on every site.
        settings = read_recipe(path).settings
        clusters = clusters or _text(settings, "clusters")
        rendezvous = rendezvous or _text(settings, "rendezvous")
    roster, here = roster_here(local_clusters, cluster, clusters, rendezvous)
    console.print("checking recipe...", highlight=False)
    answer = _checked(path, overrides, roster, here[0])
    plan = _Plan(
        recipe=path,
        overrides=overrides,
        roster=roster,
        here=here,
        processes=processes_per_cluster,
        output_dir=Path(str(answer["output_dir"])),
        # Of several sites, the one with the first cluster compares.
        compare_alone=bool(answer["compare_alone"]) and roster.names[0] in here,
    )
    console.print(
        f"recipe {path.name} ({answer['recipe']}): {', '.join(here)} of {len(roster.names)} clusters; "
        f"output in {plan.output_dir}",
        highlight=False,
        soft_wrap=True,
    )
    sys.exit(_train(plan, console, grace_s))


def _train(plan: _Plan, console: Console, grace_s: float) -> int:
    jobs = [plan.cluster(name) for name in plan.here]
    outcomes, interrupted_by = _supervise(jobs, console, grace_s)
    directories = {name: plan.output_dir / name for name in plan.here}
    differ = digests_differ(directories)
    columns = dict(directories)
    if plan.compare_alone and interrupted_by is None and all(outcome.ok for outcome in outcomes):
        console.print(f"for comparison: {plan.roster.names[0]} alone, without the other clusters", highlight=False)
        alone, interrupted_by = _supervise([plan.cluster(plan.roster.names[0], alone=True)], console, grace_s)
        outcomes += alone
        columns["alone"] = plan.output_dir / "alone"
    table = summary_table(columns, plan.recipe.stem)
    if table.row_count:
        console.print(table)
    if interrupted_by is not None:
        click.secho(f"nebula: ended early by {signal.Signals(interrupted_by).name}", fg="yellow", err=True)
    for sentence, names in degradations(directories).items():
        click.secho(f"nebula: {', '.join(names)}: {sentence}", fg="yellow", err=True)
    if interrupted_by is None:
        failed = {str(o): plan.output_dir / o.name / "cluster.log" for o in outcomes if not o.ok}
        _show_failures(failed)
    if differ:
        click.secho("nebula: the clusters ended with different parameters", fg="red", err=True)
    return exit_code(outcomes, interrupted_by) or int(differ)


def _supervise(jobs: Sequence[Cluster], console: Console, grace_s: float) -> tuple[list[Outcome], int | None]:
    directories = {}
    for job in jobs:
        assert job.log is not None
        directories[job.name] = job.log.parent
    with ExitStack() as folders, Board(console, directories) as board:
        for directory in directories.values():
            folders.enter_context(_only_run_in(directory))
            forget_reports(directory)

        def on_exit(outcome: Outcome) -> None:
            stopped = supervisor.interrupted_by is not None
            board.ended(outcome.name, "done" if outcome.ok else "stopped" if stopped else "failed")
            if not outcome.ok and not stopped:
                log = directories[outcome.name] / "cluster.log"
                console.print(f"[red]{outcome}[/]; its log: {log}", highlight=False, soft_wrap=True)

        supervisor = Supervisor(jobs, grace_s=grace_s, on_exit=on_exit, on_tick=board.tick)
        outcomes = supervisor.run()
    return outcomes, supervisor.interrupted_by


@contextmanager
def _only_run_in(directory: Path) -> Iterator[None]:
    """Hold a cluster's folder, as long as this process lives: two runs in one destroy each other's files."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise NebulaError(f"a run is still writing to {directory}: end it first, or set another --output_dir") from None
    except OSError:
        pass  # a network file system that knows no locks
    try:
        yield
    finally:
        os.close(handle)


def _checked(recipe: Path, overrides: Sequence[str], roster: Roster, name: str) -> dict[str, object]:
    """Have a process with Paddle in it check the recipe as the clusters will read it.

    Raises:
        ConfigurationError: with every problem.
        NebulaError: the check itself could not run.
    """
    with tempfile.TemporaryDirectory(prefix="nebula-") as folder:
        answer = Path(folder) / "answer.json"
        process = subprocess.run(
            [
                sys.executable,
                str(_WORKER),
                "--check-into",
                str(answer),
                str(recipe),
                *overrides,
                *roster.overrides(name),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent(),
        )
        if process.returncode or not answer.exists():
            tail = "\n".join(process.stdout.splitlines()[-_TAIL_LINES:])
            raise NebulaError(f"the recipe could not be checked: the process ended with {process.returncode}:\n{tail}")
        content: dict[str, object] = json.loads(answer.read_text(encoding="utf-8"))
    problems = content["problems"]
    if isinstance(problems, list) and problems:
        raise ConfigurationError(problems)
    return content


def _show_failures(logs: Mapping[str, Path]) -> None:
    """How each cluster ended (a sentence -> its log) and why: in the package's own words, else its last lines."""
    reasons: dict[str, None] = {}
    for ended, log in logs.items():
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        finder = RefusalFinder()
        for line in lines:
            finder.see(line)
        click.secho(f"nebula: {ended}; {'its log is' if finder.refusal else 'the end of'} {log}", fg="red", err=True)
        if finder.refusal:
            reasons[finder.refusal] = None
            continue
        for line in lines[-_TAIL_LINES:]:
            click.echo(f"  | {line}", err=True)
    for reason in reasons:  # clusters refuse with the same words
        click.secho(f"nebula: {reason}", fg="red", err=True)


def _text(settings: Mapping[str, Setting], key: str) -> str | None:
    value = settings[key].value if key in settings else None
    return value if isinstance(value, str) else None
