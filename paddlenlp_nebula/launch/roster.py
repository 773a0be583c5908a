"""What each cluster is started with: its name, its environment, its command."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.security.throwaway import throw_away, throwaway_folder, thrown_away

__all__ = ["Roster", "free_ports", "local_roster", "paddle_command", "secured", "split_devices", "thread_variables"]

_NAMES = ("west", "east", "north", "south")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Roster:
    """All clusters of a run and the place where they meet.

    Attributes:
        names: the clusters.
        rendezvous: "host:port" of their doors, separated by commas; of the first one's at least.
        certificates: folder with everybody's (`secured`); None where each site has its own.
    """

    names: tuple[str, ...]
    rendezvous: str
    certificates: Path | None = None

    def environment(self, name: str) -> dict[str, str]:
        """The variables by which NebulaArguments finds out which cluster it is."""
        return {
            "NEBULA_CLUSTER": name,
            "NEBULA_CLUSTERS": ",".join(self.names),
            "NEBULA_RENDEZVOUS": self.rendezvous,
            **{f"NEBULA_{field.upper()}": path for field, path in self._tls_files(name).items()},
        }

    def overrides(self, name: str) -> list[str]:
        """The same as recipe overrides, which win over what a recipe file says."""
        return [
            *("--cluster", name),
            *("--clusters", ",".join(self.names)),
            *("--rendezvous", self.rendezvous),
            *(word for field, path in self._tls_files(name).items() for word in (f"--{field}", path)),
        ]

    def _tls_files(self, name: str) -> dict[str, str]:
        if self.certificates is None:
            return {}
        files = thrown_away(name, self.certificates)
        return {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


@contextmanager
def secured(roster: Roster) -> Iterator[Roster]:
    """The roster of clusters on this machine with certificates made for them, which are there inside the block."""
    if not all(name.isascii() for name in roster.names):  # which TLS needs, and says if it is asked for
        yield roster
        return
    with throwaway_folder() as folder:
        throw_away(roster.names, folder)
        yield replace(roster, certificates=folder)


def local_roster(count: int | None, clusters: str | None) -> Roster:
    """Clusters on this machine: ``count`` of them, or those named in ``clusters``.

    Raises:
        ConfigurationError: the two contradict each other, or a name is used twice.
    """
    names = tuple(name.strip() for name in clusters.split(",")) if clusters else ()
    if not names:
        names = tuple((*_NAMES, *(f"c{number}" for number in range(5, 65)))[: count or 0])
    if count is not None and not (1 <= count <= 64 and len(names) == count):
        got = f"the names {', '.join(names)}" if clusters else "no names"
        raise ConfigurationError([f"--local-clusters must be 1 to 64 and match --clusters, got {count} and {got}"])
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigurationError(
                [f"--clusters must be letters, digits, '-' and '_', comma-separated, got {clusters!r}"]
            )
    if len(set(names)) != len(names):
        raise ConfigurationError([f"--clusters must name each cluster once, got {clusters!r}"])
    return Roster(names, ",".join(f"127.0.0.1:{port}" for port in free_ports(len(names))))


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that nobody listens on at this moment."""
    with ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found


def thread_variables(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Numerical threads for each of ``processes`` on this machine, where the user has not chosen.

    Without it every process starts a thread per core, and two clusters on one machine are several
    times slower than one.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    return {name: threads for name in _THREAD_VARIABLES if name not in environment}


def split_devices(index: int, clusters: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Give each local cluster GPUs of its own, if there are enough; otherwise leave the choice alone."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = Path("/proc/driver/nvidia/gpus")
        devices = [str(number) for number in range(len(list(gpus.iterdir())))] if gpus.is_dir() else []
    else:
        devices = [device.strip() for device in visible.split(",") if device.strip()]
    share = len(devices) // clusters
    if not share:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[index * share : (index + 1) * share])}


def paddle_command(script: str, arguments: Sequence[str], processes: int, log_dir: Path) -> list[str]:
    """The command of one cluster: the script itself, or ``processes`` of it under Paddle's launcher.

    Args:
        script: path of a Python file.
        arguments: its arguments.
        processes: data-parallel processes in this cluster.
        log_dir: where Paddle's launcher writes a log per process; must not be shared by clusters.
    """
    python = [sys.executable, "-u"]
    if processes > 1:
        python += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", str(log_dir)]
    return [*python, script, *arguments]
