"""The courier: the contract over real MPI jobs, and every way in which one can die."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from paddlenlp_nebula.errors import ChannelLost, NebulaError
from paddlenlp_nebula.security.throwaway import throw_away
from paddlenlp_nebula.transport import doorbells
from paddlenlp_nebula.transport.courier import CourierChannel
from paddlenlp_nebula.transport.launch import courier_environment, find_mpiexec

from . import contract
from .couriers import courier_below, gone, mesh, pair, processes_below

pytestmark = pytest.mark.mpi

REPOSITORY = Path(__file__).resolve().parents[2]
HYDRA = [str(Path(sys.executable).parent / "mpiexec"), "-launcher", "fork", "-rmk", "user"]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test does to its couriers: no process, no descriptor and no file is left."""

    def mpi_files() -> set[Path]:
        return set(Path("/dev/shm").glob("mpich_shm_*"))

    def mine() -> list[psutil.Process]:
        return [process for process in processes_below(os.getpid()) if process.pid not in before]

    before = {process.pid for process in processes_below(os.getpid())}
    files = mpi_files()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert gone(mine(), 20), mine()
    assert not mine(), "a zombie of ours"
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert not mpi_files() - files


@pytest.mark.parametrize(
    ("names", "chunk_bytes", "mpiexec", "settings", "tls"),
    [
        ("west,east", 1024, None, {}, True),
        ("west,east", 1024, None, {}, False),
        ("west,east", 1 << 17, None, {"MPIR_CVAR_NOLOCAL": "1"}, False),  # TCP whatever the provider
        ("west,east", 1 << 20, None, {"MPIR_CVAR_NOLOCAL": "1"}, True),
        ("west,east", 1 << 17, None, {"MPIR_CVAR_CH4_NETMOD": "ucx"}, False),  # shared memory on one host
        ("a,b,c", 4096, HYDRA, {}, True),
        ("a,b,c", 4096, HYDRA, {}, False),
    ],
)
def test_contract(
    names: str,
    chunk_bytes: int,
    mpiexec: list[str] | None,
    settings: dict[str, str],
    tls: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    roster = names.split(",")
    channels = mesh(roster, chunk_bytes, 4, mpiexec, throw_away(roster, tmp_path) if tls else None)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: contract.run_all(name, channels[name], 4), channels))
    finally:
        for each in channels.values():
            contract.close_all(each)


def test_the_time_of_sending_is_the_couriers() -> None:
    """The rate counts the time in which chunks were on their way, not that in which nobody looked."""
    with pair() as (west, east):
        began = time.monotonic()
        contract.send(west, b"first")
        assert contract.receive(east) == b"first"
        contract.wait_until(west.flushed, west)
        taken_s = time.monotonic() - began
        assert west.bytes_delivered == west.bytes_sent == 5
        assert 0 < west.seconds_sending <= taken_s
        before = west.seconds_sending
        time.sleep(1.0)
        contract.send(west, b"second")
        time.sleep(1.0)  # delivered long before anybody looks
        assert contract.receive(east) == b"second"
        contract.wait_until(west.flushed, west)
        assert west.bytes_delivered == 11
        assert west.seconds_sending - before < 0.8
        assert east.seconds_sending == 0


def test_what_there_is_no_chunk_for_stays_out_of_the_couriers_memory() -> None:
    """It waits in TCP's window; MPI's default is to keep up to 64 messages of any size, and to copy them once more."""
    chunks, chunk_bytes, total = 8, 1 << 20, 40

    def own_bytes(channel: CourierChannel) -> int:
        memory = courier_below(channel).memory_info()
        return memory.rss - memory.shared

    with pair(chunk_bytes=chunk_bytes, chunks=chunks) as channels:
        before = [own_bytes(channel) for channel in channels]
        sent, got, peaks = [0, 0], [0, 0], list(before)
        reads_from = time.monotonic() + 0.5
        deadline = reads_from + contract.DEADLINE_S
        while min(got) < total:
            assert time.monotonic() < deadline
            for side, channel in enumerate(channels):
                channel.progress()
                while sent[side] < total and channel.reserve() is not None:
                    channel.commit(chunk_bytes)
                    sent[side] += 1
                if time.monotonic() > reads_from and channel.peek() is not None:
                    channel.release()
                    got[side] += 1
            peaks = [max(two) for two in zip(peaks, map(own_bytes, channels), strict=True)]
        assert all(peak - own < chunks * chunk_bytes // 2 for peak, own in zip(peaks, before, strict=True))


def drive(*channels: CourierChannel, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for channel in channels:
            channel.progress()
        select.select(channels, [], [], 0.05)


def lost(channel: CourierChannel, within_s: float = 20.0) -> ChannelLost:
    with pytest.raises(ChannelLost) as caught:
        drive(channel, within_s=within_s)
    assert caught.value.peer == channel.peer
    return caught.value


@pytest.mark.parametrize("victim", ["courier", "mpiexec", "hydra's courier", "hydra's mpiexec"])
def test_a_killed_courier_is_a_lost_channel_after_what_it_had_delivered(victim: str) -> None:
    with pair(mpiexec=HYDRA if "hydra" in victim else None) as (west, east):
        contract.send(east, b"one")
        contract.send(east, b"two")
        contract.wait_until(lambda: west.peek() is not None and east.flushed(), west, east)
        time.sleep(0.05)
        if victim.endswith("courier"):
            courier_below(west).kill()
        else:
            os.kill(west.launcher, signal.SIGKILL)
        for word in (b"one", b"two"):
            for _ in range(20):
                west.progress()
                time.sleep(0.02)
            assert contract.receive(west) == word
        assert "its courier ended" in str(lost(west))
        assert west.reserve() is None
        assert west.free_chunks() == 0


def test_a_stopped_courier_can_be_closed() -> None:
    with pair() as (west, _):
        family = processes_below(west.launcher)
        courier_below(west).suspend()
        began = time.monotonic()
        west.close()
        assert time.monotonic() - began < 10
        assert gone(family, 1)


@pytest.mark.parametrize("state", ["joined", "inside_mpi"])
def test_nothing_survives_a_killed_leader_with_a_data_worker(state: str) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.couriers", state], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    worker = int(leader.stdout.readline())
    couriers = [process for process in processes_below(leader.pid) if process.pid != worker]
    assert len(couriers) == (4 if state == "joined" else 2)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    try:
        assert psutil.pid_exists(worker), "the data worker itself is not ours to end"
        assert gone(couriers, 3)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_lets_go() -> None:
    with pair() as (west, east):
        inherited = west.fileno()
        assert inherited is not None
        child = os.fork()
        if child == 0:
            closed = west.fileno() is None and not os.path.exists(f"/proc/self/fd/{inherited}")
            west.close()
            os._exit(0 if closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        contract.send(west, b"still here")
        assert contract.receive(east) == b"still here"


def test_a_port_that_nobody_accepts_and_one_that_nobody_connects_to() -> None:
    waiting, knocking = CourierChannel("east", 1024, 4), CourierChannel("west", 1024, 4)
    dead = CourierChannel("gone", 1024, 4)
    try:
        for channel in (waiting, dead):
            channel.open_port()
            contract.wait_until(lambda channel=channel: channel.port is not None, channel)
        assert dead.port is not None
        dead.close()
        waiting.accept(1.5)
        assert "'east' did not connect within 1.5 s" in str(lost(waiting, 2.5))
        knocking.connect(dead.port, 1)
        assert "'west'" in str(lost(knocking, 2.5))
    finally:
        waiting.close()
        knocking.close()


def test_different_chunk_sizes_are_refused() -> None:
    west, east = CourierChannel("east", 1024), CourierChannel("west", 2048)
    try:
        west.open_port()
        contract.wait_until(lambda: west.port is not None, west)
        assert west.port is not None
        west.accept(10)
        east.connect(west.port, 10)
        with pytest.raises(ChannelLost):
            drive(west, east, within_s=10)
        assert "chunks here have 1024 bytes but 2048 there" in str(lost(west, 10))
        assert "chunks here have 2048 bytes but 1024 there" in str(lost(east, 10))
    finally:
        west.close()
        east.close()


def test_strangers_and_garbage() -> None:
    """Who has no token is shown the door; a courier that talks nonsense is a lost channel, not a crash."""
    channel = CourierChannel("east", 1024, 4)
    try:
        os.kill(channel.launcher, signal.SIGSTOP)
        address = channel._listener.getsockname()
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(address)
        stranger.send(doorbells.pack(doorbells.Record(doorbells.Kind.HELLO, text="f" * 64)))
        channel.progress()
        assert stranger.recv(10) == b""
        stranger.close()
        os.kill(channel.launcher, signal.SIGCONT)
        channel.open_port()
        contract.wait_until(lambda: channel.port is not None, channel)
        # What the real courier cannot be made to say: put it into the socket's other end.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert channel._bell is not None
        channel._bell.socket.close()
        channel._bell = doorbells.Doorbell(ours)
        theirs.send(doorbells.pack(doorbells.Record(doorbells.Kind.RECEIVED, slot=77, number=1 << 60)))
        assert "RECEIVED 77" in str(lost(channel))
        theirs.close()
    finally:
        channel.close()


@pytest.mark.parametrize(
    "packet", [b"", b"x", b"\0" * 16, b"\x63" + b"\0" * 15, b"\x08\0\xff\xff" + b"\0" * 12, b"\x08" + b"\0" * 20]
)
def test_records_have_a_fixed_layout(packet: bytes) -> None:
    with pytest.raises(NebulaError):
        doorbells.unpack(packet)


def test_records_come_back_as_they_were() -> None:
    for kind in doorbells.Kind:
        record = doorbells.Record(kind, 3, 1 << 40, "text é")
        assert doorbells.unpack(doorbells.pack(record)) == record
    assert len(doorbells.unpack(doorbells.pack(doorbells.Record(kind, text="x" * 9999))).text) == doorbells.TEXT_BYTES


def test_last_words_are_quoted() -> None:
    failing = [shutil.which("sh") or "/bin/sh", "-c", "echo something helpful >&2; exit 7"]
    channel = CourierChannel("east", 1024, 4, mpiexec=failing)
    try:
        words = str(lost(channel))
    finally:
        channel.close()
    assert "mpiexec ended with 7" in words
    assert "something helpful" in words
    with pytest.raises(NebulaError, match="cannot be started"):
        CourierChannel("east", 1024, 4, mpiexec=["/no/such/mpiexec"])


def test_the_environment_of_a_courier() -> None:
    environment = courier_environment(
        {
            "PMI_RANK": "1",
            "PMIX_RANK": "1",
            "HYDI_CONTROL_FD": "3",
            "MPI_LOCALNRANKS": "2",
            "OMPI_COMM_WORLD_RANK": "0",
            "MPIR_CVAR_NOLOCAL": "1",
            "FI_PROVIDER": "verbs",
            "OMP_NUM_THREADS": "16",
            "HOME": "/home/me",
        }
    )
    assert not {name for name in environment if name.startswith(("PMI", "HYD", "MPI_", "OMPI"))}
    assert environment["MPIR_CVAR_NOLOCAL"] == "1"
    assert environment["FI_PROVIDER"] == "verbs"
    assert environment["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert Path(find_mpiexec()[0]).parent == Path(sys.executable).parent


def test_importing_starts_nothing_and_a_courier_imports_little() -> None:
    code = (
        "import sys, threading, paddlenlp_nebula.transport.courier, paddlenlp_nebula.transport.world,"
        "paddlenlp_nebula.transport.loopback, paddlenlp_nebula.transport.courier_process;"
        "heavy = {'mpi4py', 'mpi4py.MPI', 'paddle', 'paddlenlp', 'numpy', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_works_under_an_outer_mpiexec() -> None:
    """A leader that is itself an MPI rank (of anybody's MPI) still gets its courier."""
    code = "from tests.transport.couriers import pair\nwith pair() as (a, b): print('joined')"
    run = subprocess.run(
        [*HYDRA, "-n", "1", sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.strip() == "joined", run.stderr
