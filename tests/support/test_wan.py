"""The wide area itself: rate, delay, cuts, counters, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.wan import Site, WideArea, available, sweep, wide_area

pytestmark = [pytest.mark.netns, pytest.mark.skipif(available(delay=True) is not None, reason=str(available()))]

_MEASURE = """
import socket, sys, time
role, address, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "serve":
    with socket.create_server((address, 5000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        connection.sendall(connection.recv(1))  # one round trip
        while nbytes > 0:
            nbytes -= len(connection.recv(1 << 16))
        connection.sendall(b"!")
else:
    with socket.create_connection((address, 5000), timeout=20) as connection:
        start = time.perf_counter()
        connection.sendall(b"?"); connection.recv(1)
        rtt = time.perf_counter() - start
        start = time.perf_counter()
        connection.sendall(bytes(nbytes)); connection.recv(1)
        print(rtt, time.perf_counter() - start)
"""


def measure(server: Site, client: Site, nbytes: int) -> tuple[float, float]:
    """Round trip and transfer time of ``nbytes`` from client to server, seconds."""
    command = [sys.executable, "-c", _MEASURE]
    with server.popen([*command, "serve", server.address, str(nbytes)], stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        serving.stdout.readline()
        rtt, taken = client.run([*command, "ask", server.address, str(nbytes)]).stdout.split()
    return float(rtt), float(taken)


def reaches(source: Site, target: Site) -> bool:
    with target.popen([sys.executable, "-c", _MEASURE, "serve", target.address, "0"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        probe = f"import socket; socket.create_connection(('{target.address}', 5000), timeout=1.5)"
        reached = source.popen([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).wait() == 0
        server.kill()
    return reached


@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_rate_delay_counters_and_cut(rtt_ms: int) -> None:
    with wide_area(("west", "mid", "east"), rate_mbit=50, rtt_ms=rtt_ms) as wan:
        west, mid, east = wan.sites
        measured = [measure(west, east, 4_000_000) for _ in range(3)]  # a busy machine adds to both
        assert rtt_ms / 1e3 <= min(rtt for rtt, _ in measured) < rtt_ms / 1e3 + 0.03
        assert 20 < max(4 * 8 / taken for _, taken in measured) <= 53
        assert 12e6 < east.counters().sent < 13.2e6
        assert 12e6 < west.counters().received < 13.2e6
        assert east.run(["hostname"]).stdout.strip() == "east"
        assert east.run(["getent", "hosts", "west"]).stdout.split()[0] == west.address
        wan.cut("east")
        assert not reaches(west, east)
        assert not reaches(east, west)
        assert reaches(west, mid)
        wan.restore()
        assert reaches(west, east)
        wan.cut()
        assert not reaches(west, mid)


_COUNT = """
import socket, sys
role, address = sys.argv[1:]
if role == "serve":
    with socket.create_server((address, 5000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        print(len(received), len(received) - received.count(0))
else:
    with socket.create_connection((address, 5000), timeout=20) as connection:
        connection.sendall(bytes(50_000))
"""


def damaged(server: Site, client: Site) -> tuple[int, int]:
    """How many bytes arrive of 50,000 zeros, and how many are no zeros any more."""
    command = [sys.executable, "-c", _COUNT]
    with server.popen([*command, "serve", server.address], stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        serving.stdout.readline()
        client.run([*command, "ask", server.address])
        arrived, changed = map(int, serving.stdout.read().split())
    return arrived, changed


def test_bad_weather() -> None:
    with wide_area(("west", "mid", "east"), rate_mbit=50, rtt_ms=10) as wan:
        west, mid, east = wan.sites
        wan.part("west", "east")
        assert not reaches(west, east)
        assert reaches(west, mid)
        assert reaches(east, mid)
        wan.join("west", "east")
        wan.cut("mid")
        wan.cut("east")
        wan.restore("mid")
        assert reaches(west, mid)
        assert not reaches(west, east)
        wan.restore()
        wan.lose(1.0, "east")
        assert not reaches(west, east)
        wan.lose(0.0, "east")
        assert reaches(west, east)
        wan.damage("west", seed=1, mend=True)
        assert damaged(east, west) == (50_000, 1)
        wan.damage("west", seed=1, mend=False)
        assert damaged(east, west) == (50_000, 0)
        wan.slow(2.0, "west")
        assert measure(east, west, 400_000)[1] > 1.0
        wan.slow(None, "west")
        assert measure(east, west, 400_000)[1] < 1.0
        with pytest.raises(ValueError, match="rtt_ms must be positive"), wide_area(("one",)) as plain:
            plain.lose(0.5)


def namespaces_of(pid: int) -> list[str]:
    return sorted(name for name in os.listdir("/run/netns") if f"-{pid}-" in name)


def gone(check: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_failing_block_leaves_nothing() -> None:
    def fail(wan: WideArea) -> subprocess.Popen[bytes]:
        sleeper = wan.sites[0].popen(["sleep", "100"])
        raise KeyError(sleeper.pid)

    def left() -> tuple[list[str], list[Path]]:
        return namespaces_of(os.getpid()), sorted(Path("/etc").glob(f"netns/*-{os.getpid()}-*"))

    before = left()  # the fault tests may have a wide area open in this very process
    with pytest.raises(KeyError) as caught, wide_area(rtt_ms=5) as wan:
        fail(wan)
    assert left() == before
    assert os.waitpid(caught.value.args[0], 0)[1] == signal.SIGKILL


def test_a_killed_owner_is_swept() -> None:
    owner_script = (
        "import subprocess, sys, time; from tests.support.wan import wide_area\n"
        "with wide_area(rtt_ms=5) as wan:\n"
        "    print(wan.sites[0].popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", owner_script], stdout=subprocess.PIPE, cwd=root) as owner:
        assert owner.stdout is not None
        sleeper = int(owner.stdout.readline())
        sweep()
        assert namespaces_of(owner.pid), "a living owner's namespaces stay"
        owner.kill()
    sweep()
    assert not namespaces_of(owner.pid)
    assert gone(lambda: os.path.exists(f"/proc/{sleeper}") and " Z " not in Path(f"/proc/{sleeper}/stat").read_text())
