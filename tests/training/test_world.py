"""Trainers under one mpiexec over all leaders (``rendezvous=world``): MPI in the trainer itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Outcome, make_certificates, worker_environment

from tests.transport.test_world import mpich, openmpi

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(200)]

_SPECS = [
    {"name": "first", "model": "mlp", "items": 64, "nebula": {"sync_data": "shard"}, "train": {"max_steps": 6}},
    {"name": "workers", "model": "mlp", "items": 64, "train": {"max_steps": 4, "dataloader_num_workers": 2}},
]


@pytest.mark.parametrize("mpi", [mpich, openmpi])
def test_two_trainings_in_one_world(tmp_path, mpi):
    mpiexec, extra = mpi()
    make_certificates(("west", "east"), tmp_path)
    specs = tmp_path / "specs.json"
    specs.write_text(json.dumps([{**s, "clusters": ["west", "east"], "rendezvous": "world"} for s in _SPECS]))
    worker = str(Path(__file__).with_name("worker.py"))
    parts = [["-n", "1", sys.executable, worker, cluster, str(specs), str(tmp_path)] for cluster in ("west", "east")]
    run = subprocess.run(
        [*mpiexec, *parts[0], ":", *parts[1]],
        env={**worker_environment(), **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    for spec in _SPECS:
        west, east = (Outcome(tmp_path, spec["name"], cluster) for cluster in ("west", "east"))
        assert (west.error, east.error) == (None, None)
        assert west.distance(east) == 0.0
        assert west.report["rounds"] == west.result["steps"]
