"""Starting the clusters of a training test and reading what they wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paddlenlp_nebula.security.throwaway import throw_away

__all__ = [
    "Outcome",
    "free_port",
    "make_certificates",
    "run_clusters",
    "run_forked",
    "run_reference",
    "worker_environment",
]

_HERE = Path(__file__).parent
_REPO = _HERE.parent.parent


def free_port() -> int:
    """A TCP port of this machine that nothing uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Outcome:
    """What one process of one cluster wrote for one spec."""

    def __init__(self, folder: Path, name: str, cluster: str, rank: int = 0) -> None:
        stem = f"{name}.{cluster}.r{rank}"
        self.result = json.loads((folder / f"{stem}.json").read_text())
        self.parameters = _arrays(folder / f"{stem}.npz")
        self.state = _arrays(folder / f"{stem}.state.npz")

    @property
    def error(self) -> str | None:
        """The error the spec ended with, or None."""
        return self.result.get("error")

    @property
    def report(self) -> dict:
        """The ledger's report."""
        return self.result["report"]

    def distance(self, other: Outcome) -> float:
        """Largest absolute difference between two sets of parameters."""
        assert self.parameters.keys() == other.parameters.keys(), (self.error, other.error)
        return max(float(np.abs(self.parameters[key] - other.parameters[key]).max()) for key in self.parameters)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path)) if path.exists() else {}


def worker_environment(**extra: str) -> dict[str, str]:
    """What a worker process needs, on a machine that it shares with others."""
    path = f"{_REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **extra}


def _command(cluster: str, specs: Path, folder: Path, processes: int) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes)]
        start += ["--log_dir", str(folder / f"log-{cluster}")]
    return [*start, str(_HERE / "worker.py"), cluster, str(specs), str(folder)]


def _run(names: list[str], specs: list[dict], folder: Path, processes: int, timeout_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"specs-{names[0]}.json"
    path.write_text(json.dumps(specs))
    jobs = []
    for name in names:
        log = (folder / f"{name}.log").open("w")
        command = _command(name, path, folder, processes)
        jobs.append(
            subprocess.Popen(command, env=worker_environment(), stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        )
    try:
        for job in jobs:
            job.wait(timeout_s)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()


def make_certificates(clusters: Sequence[str], folder: Path) -> None:
    """The clusters' certificates, where ``worker.py`` expects them."""
    (folder / "keys").mkdir(parents=True, exist_ok=True)
    throw_away(clusters, folder / "keys")


def run_clusters(
    specs: list[dict],
    folder: Path,
    clusters: tuple[str, ...] = ("west", "east"),
    processes: int = 1,
    timeout_s: float = 240,
) -> None:
    """Run the specs on real clusters: separate jobs, couriers, MPI."""
    make_certificates(clusters, folder)
    filled = [
        {**spec, "clusters": list(clusters), "rendezvous": f"127.0.0.1:{free_port()}", "processes": processes}
        for spec in specs
    ]
    _run(list(clusters), filled, folder, processes, timeout_s)


def run_forked(
    cases: list[list[dict]], folder: Path, clusters: tuple[str, ...] = ("west", "east"), timeout_s: float = 900
) -> None:
    """Run many cases on real clusters, each spec of a case in fresh processes; see ``forks.py``."""
    make_certificates(clusters, folder)
    path = folder / "cases.json"
    path.write_text(json.dumps([[{"clusters": list(clusters), **spec} for spec in case] for case in cases]))
    with (folder / "forks.log").open("w") as log:
        command = [sys.executable, str(_HERE / "forks.py"), str(path), str(folder)]
        environment = worker_environment()
        subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, timeout=timeout_s, check=True
        )


def run_reference(
    specs: list[dict], folder: Path, clusters: tuple[str, ...] = ("west", "east"), timeout_s: float = 240
) -> None:
    """Run the specs as one job on the concatenated batches, without the plugin."""
    _run(["reference"], [{**spec, "clusters": list(clusters)} for spec in specs], folder, 1, timeout_s)
