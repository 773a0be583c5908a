"""Too little shared memory: a sentence that says where, how much and what to do, not a courier that just ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.transport.courier import CourierChannel
from paddlenlp_nebula.transport.courier_process import Lost, refuse_little_shared_memory

REPOSITORY = Path(__file__).resolve().parents[2]


def a_file_system(monkeypatch: pytest.MonkeyPatch, free: int, flags: int = 0) -> None:
    room = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_flag=flags)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)


def test_enough_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse_little_shared_memory(str(tmp_path / "not there"))
    a_file_system(monkeypatch, free=4 << 20)
    refuse_little_shared_memory(str(tmp_path))


def test_too_little_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_file_system(monkeypatch, free=64 << 10)
    with pytest.raises(Lost, match=rf"needs 4.2 MB free in {tmp_path}, but got 0.1 MB; .*--shm-size=2g"):
        refuse_little_shared_memory(str(tmp_path))


def test_read_only_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_file_system(monkeypatch, free=4 << 30, flags=os.ST_RDONLY)
    with pytest.raises(Lost, match=rf"free in {tmp_path}, but it is read-only; mount it writable"):
        refuse_little_shared_memory(str(tmp_path))


_START = """
import select
from paddlenlp_nebula.errors import ChannelLost
from paddlenlp_nebula.transport.courier import CourierChannel
channel = CourierChannel("east", 1024, 4)
channel.open_port()
try:
    while channel.port is None:
        channel.progress()
        select.select([channel], [], [], 0.05)
    print("it has a port")
except ChannelLost as lost:
    print(lost)
channel.close()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=64k", "to cluster 'east' is lost: MPI in its courier needs 4.2 MB free in /dev/shm, but got 0.1 MB"),
        ("ro", "to cluster 'east' is lost: MPI in its courier needs 4.2 MB free in /dev/shm, but it is read-only"),
        ("size=4m", "it has a port"),
    ],
)
def test_a_small_dev_shm(options: str, said: str) -> None:
    """A container's, for example."""
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && "$0" -c "$1"; ls /dev/shm', sys.executable, _START],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said in run.stdout, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) == 1, "MPI has left a file"


def test_a_limit_on_the_memory_shared_with_the_courier() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NebulaError, match=r"a link needs 8.4 MB of memory shared .* got 'File too large': raise"):
            CourierChannel("east", 1 << 20, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == descriptors
