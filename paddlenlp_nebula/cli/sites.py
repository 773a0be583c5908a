"""The options of ``run`` and ``launch`` that say which clusters there are and which of them start here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.launch.roster import Roster, local_roster, secured
from paddlenlp_nebula.transport.launch import find_mpiexec

__all__ = ["hyphens", "roster_here", "site_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--local-clusters", type=click.IntRange(1, 64), metavar="N", help="Start N clusters on this machine."),
    click.option("--cluster", metavar="NAME", help="Start only this site's cluster."),
    click.option(
        "--clusters",
        metavar="A,B,...",
        help="All clusters' names, the same on every site; the first keeps the door. Default on one machine: "
        "west,east,north,south,c5,...",
    ),
    click.option("--rendezvous", metavar="HOST:PORT", help="Where the first cluster's door is (with --cluster)."),
    click.option(
        "--processes-per-cluster",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Data-parallel processes in each cluster, started by paddle.distributed.launch.",
    ),
    click.option(
        "--grace-s",
        type=click.FloatRange(min=0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="After Ctrl-C, time to end by themselves before SIGTERM, and again before SIGKILL.",
    ),
)


def hyphens(option: str) -> str:
    """Lets options be written with underscores, too, as PaddleNLP's are: --local_clusters is --local-clusters."""
    return option.replace("_", "-")


def site_options(command: _Command) -> _Command:
    """Add the options, in the order in which help shows them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def roster_here(
    local_clusters: int | None, cluster: str | None, clusters: str | None, rendezvous: str | None
) -> tuple[Roster, tuple[str, ...]]:
    """All clusters, and the names of those to start on this machine.

    Clusters of one machine have certificates made for them, which are there as long as the command runs.

    Raises:
        ConfigurationError: the options do not say it, or contradict each other.
        NebulaError: the clusters' couriers could not be started here.
    """
    roster, here = _roster_here(local_clusters, cluster, clusters, rendezvous)
    if len(roster.names) > 1 and roster.rendezvous not in ("world", "loopback"):
        find_mpiexec()  # the clusters would find out themselves, after seconds of importing Paddle
    return roster, here


def _roster_here(
    local_clusters: int | None, cluster: str | None, clusters: str | None, rendezvous: str | None
) -> tuple[Roster, tuple[str, ...]]:
    if cluster is None:
        if local_clusters is None and clusters is None:
            raise ConfigurationError(
                [
                    "it must be said which clusters start here, got nothing: use --local-clusters 2 to try it on this "
                    "machine, or on each site --cluster NAME --clusters A,B --rendezvous HOST:PORT"
                ]
            )
        if rendezvous is not None:
            raise ConfigurationError(
                [f"--rendezvous goes with --cluster (clusters of one machine find each other), got {rendezvous!r}"]
            )
        roster = local_roster(local_clusters, clusters)
        return click.get_current_context().with_resource(secured(roster)), roster.names
    if local_clusters is not None:
        raise ConfigurationError(
            [f"either --local-clusters or --cluster must be given, got both ({local_clusters} and {cluster!r})"]
        )
    if missing := [
        option
        for option, given, variable in (
            ("--clusters A,B", clusters, "NEBULA_CLUSTERS"),
            ("--rendezvous HOST:PORT", rendezvous, "NEBULA_RENDEZVOUS"),
        )
        if not given and not os.environ.get(variable)
    ]:
        raise ConfigurationError(
            [f"--cluster {cluster} needs {' and '.join(missing)} beside it, the same on every site, got nothing"]
        )
    from paddlenlp_nebula.arguments import NebulaArguments  # knows the codecs, and so loads numpy: not for --help

    # Its TLS files may be named behind this, in a script's arguments or a recipe, which is for the cluster itself to find.
    site = NebulaArguments(cluster=cluster, clusters=clusters, rendezvous=rendezvous, sync_security="none")
    assert site.rendezvous is not None  # NebulaArguments has checked it
    return Roster(site.cluster_names, site.rendezvous), (cluster,)
