"""Sites joined by a wide-area link, on this machine: network namespaces with a rate, a delay and a plug to pull.

    with wide_area(rate_mbit=100, rtt_ms=50) as wan:
        west, east = wan.sites
        server = west.popen(["iperf3", "-s", "-1"])
        east.run(["iperf3", "-c", west.address, "-t", "3"])
        wan.cut(); time.sleep(2); wan.restore()
        print(east.counters())

Every site has an address, a host name and a network of its own. Without a delay the sites hang on a router
(one more namespace) by veth pairs; with one, on TUN devices whose packets a small process holds back
(``relay.py``). ``tbf`` sets the rate of each site, both ways. Needs root; `available` says why it cannot be had.

Everything goes when the block ends. Namespaces carry their owner's process id and start time, so that what a
killed owner left is swept when the next one starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

__all__ = ["Counters", "Site", "WideArea", "available", "enter", "wide_area"]

_PREFIX = "nebula-wan"
_NAMESPACES = Path("/run/netns")
_FILES = Path("/etc/netns")  # a namespace's folder here is laid over /etc by ``ip netns exec``
_DEVICE = "wan"  # the site's own end
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_PRIVATE_ALL = 0x1000, 0x44000
_ENTER = 'hostname "$0" && exec "$@"'
_made = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes that a site's device has carried, headers included."""

    sent: int
    received: int


class Site:
    """One place of the wide area.

    Attributes:
        name: also its host name.
        address: its IPv4 address.
        namespace: its network namespace.
    """

    def __init__(self, name: str, number: int, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self.address = f"10.77.{number}.2"
        self.gateway = f"10.77.{number}.1"
        self.port = f"port{number}"

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv``, run at this site; every wrapper is replaced by the next, so its process id is the program's."""
        inside = ["unshare", "--uts", "sh", "-c", _ENTER, self.name, *argv]
        return ["ip", "netns", "exec", self.namespace, *inside]

    @property
    def place(self) -> dict[str, str]:
        """The arguments of `enter`, for a process that moves here by itself."""
        return {"name": self.name, "namespace": self.namespace}

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program here; ``options`` as for `subprocess.Popen`."""
        return subprocess.Popen(self.command(argv), **options)

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program here to its end, its output captured; raises if it fails."""
        return subprocess.run(self.command(argv), check=True, capture_output=True, text=True, **options)

    def counters(self) -> Counters:
        """What has crossed this site's device so far."""
        counted = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", _DEVICE))[0]["stats64"]
        return Counters(counted["tx"]["bytes"], counted["rx"]["bytes"])


class WideArea:
    """The sites and what lies between them."""

    def __init__(self, sites: Sequence[Site], hub: _Router | _Relay) -> None:
        self.sites = tuple(sites)
        self._hub = hub

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def cut(self, *names: str) -> None:
        """From now on packets from and to these sites (all, if none is named) vanish, as in a far-away router."""
        self._hub.cut([site for site in self.sites if not names or site.name in names])

    def restore(self, *names: str) -> None:
        """Mend the cuts of these sites (all, if none is named)."""
        self._hub.restore([site for site in self.sites if not names or site.name in names])

    def slow(self, rate_mbit: float | None, *names: str) -> None:
        """From now on these sites (all, if none is named) send no faster than this; None for no limit."""
        for site in self.sites:
            if not names or site.name in names:
                if rate_mbit is None:
                    _call(["tc", "-n", site.namespace, "qdisc", "del", "dev", _DEVICE, "root"])
                _limit(site.namespace, _DEVICE, rate_mbit)

    def part(self, one: str, other: str) -> None:
        """From now on packets between two sites vanish. This and what follows needs a delay."""
        self._relay.part(self[one], self[other], True)

    def join(self, one: str, other: str) -> None:
        """Undo `part`."""
        self._relay.part(self[one], self[other], False)

    def lose(self, share: float, *names: str) -> None:
        """From now on this share of the packets from and to these sites (all, if none is named) is lost."""
        self._relay.lose(share, [site for site in self.sites if not names or site.name in names])

    def damage(self, name: str, seed: int, *, mend: bool) -> None:
        """Change a byte of TCP's payload in the next full packet from a site.

        Args:
            name: the site.
            seed: chooses the byte and its new value.
            mend: correct TCP's checksum too, so that the damage reaches the program; without, TCP repairs it.
        """
        self._relay.damage(self[name], seed, mend)

    @property
    def _relay(self) -> _Relay:
        if not isinstance(self._hub, _Relay):
            raise ValueError("the relay, which does this, exists only with a delay: rtt_ms must be positive, got 0")
        return self._hub


def enter(name: str, namespace: str) -> None:
    """Move this thread, and what it will start, to a site (after a fork that is the whole process)."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    moved = libc.setns(there, _CLONE_NEWNET) == 0 and libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS) == 0
    moved = moved and libc.mount(None, b"/", None, _MS_PRIVATE_ALL, None) == 0
    for file in (_FILES / namespace).iterdir():
        moved = moved and libc.mount(bytes(file), bytes(Path("/etc") / file.name), None, _MS_BIND, None) == 0
    if not moved:
        raise OSError(ctypes.get_errno(), f"cannot move to the site {name!r}")
    os.close(there)
    socket.sethostname(name)


def available(*, delay: bool = False) -> str | None:
    """Why a wide area cannot be had here, or None.

    Args:
        delay: whether ``rtt_ms`` will be asked for.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)} (packages iproute2 and util-linux)"
    if delay and not Path("/dev/net/tun").exists():
        return "a delay needs /dev/net/tun"
    probe = _own_name("probe")
    try:
        _ip("netns", "add", probe)
        _ip("link", "add", "name", "here", "netns", probe, "type", "veth", "peer", "name", "there", "netns", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        _remove(probe)
    return None


@contextmanager
def wide_area(
    names: Sequence[str] = ("west", "east"),
    *,
    rate_mbit: float | None = None,
    rtt_ms: float = 0.0,
    loss: float = 0.0,
) -> Iterator[WideArea]:
    """Make sites, each at the end of its own line into the wide area.

    Args:
        names: the sites' names.
        rate_mbit: what a site can send, and receive, per second; None for no limit.
        rtt_ms: round trip between any two sites.
        loss: share of the packets lost on the way, 0..1; needs a delay.
    """
    global _made
    if loss and not rtt_ms:
        raise ValueError(
            f"loss happens in the relay, which exists only with a delay: rtt_ms must be positive, got {rtt_ms}"
        )
    sweep()
    _made += 1
    sites = [Site(name, number, _own_name(f"{_made}-{name}")) for number, name in enumerate(names)]
    hub = _Relay(rtt_ms, loss) if rtt_ms else _Router(_own_name(f"{_made}-hub"))
    try:
        hosts = "127.0.0.1 localhost\n" + "".join(f"{site.address} {site.name}\n" for site in sites)
        for site in sites:
            _ip("netns", "add", site.namespace)
            _ip("-n", site.namespace, "link", "set", "lo", "up")
            (_FILES / site.namespace).mkdir(parents=True)
            (_FILES / site.namespace / "hosts").write_text(hosts)
            (_FILES / site.namespace / "resolv.conf").write_text("# no name server: nothing waits for one\n")
        hub.connect(sites)
        for site in sites:
            _ip("-n", site.namespace, "addr", "add", f"{site.address}/24", "dev", _DEVICE)
            _ip("-n", site.namespace, "link", "set", _DEVICE, "up")
            _ip("-n", site.namespace, "route", "add", "default", "dev", _DEVICE, *hub.route(site))
            _limit(site.namespace, _DEVICE, rate_mbit)
        hub.start(sites, rate_mbit)
        yield WideArea(sites, hub)
    finally:
        hub.close()
        for site in sites:
            _remove(site.namespace)


class _Router:
    """A namespace that forwards between the sites, or does not."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def route(self, site: Site) -> tuple[str, ...]:
        return ("via", site.gateway)

    def connect(self, sites: Sequence[Site]) -> None:
        _ip("netns", "add", self.namespace)
        for site in sites:
            here, there = ("netns", site.namespace), ("netns", self.namespace)
            _ip("link", "add", "name", _DEVICE, *here, "type", "veth", "peer", "name", site.port, *there)

    def start(self, sites: Sequence[Site], rate_mbit: float | None) -> None:
        for site in sites:
            _ip("-n", self.namespace, "addr", "add", f"{site.gateway}/24", "dev", site.port)
            _ip("-n", self.namespace, "link", "set", site.port, "up")
            _limit(self.namespace, site.port, rate_mbit)
        self._forward("all", True)

    def cut(self, sites: Sequence[Site]) -> None:
        for site in sites:
            self._forward(site.port, False)  # from it, and what is for it:
            _ip("-n", self.namespace, "route", "replace", "blackhole", f"{site.address}/32")

    def restore(self, sites: Sequence[Site]) -> None:
        for site in sites:
            self._forward(site.port, True)
            with suppress(subprocess.CalledProcessError):  # it was not cut
                _ip("-n", self.namespace, "route", "del", "blackhole", f"{site.address}/32")

    def close(self) -> None:
        _remove(self.namespace)

    def _forward(self, device: str, allowed: bool) -> None:
        setting = f"net.ipv4.conf.{device}.forwarding={int(allowed)}"
        _call(["ip", "netns", "exec", self.namespace, "sysctl", "-q", "-w", setting])


class _Relay:
    """A process that holds every packet back for a while, or drops it."""

    def __init__(self, rtt_ms: float, loss: float) -> None:
        self._rtt_ms = rtt_ms
        self._loss = loss
        self._process: subprocess.Popen[bytes] | None = None
        self._cut: set[str] = set()  # addresses
        self._parted: set[tuple[str, str]] = set()
        self._losses: dict[str, float] = {}

    def route(self, site: Site) -> tuple[str, ...]:
        return ()

    def connect(self, sites: Sequence[Site]) -> None:
        relay = Path(__file__).with_name("relay.py")
        ends = [f"{site.address}={_NAMESPACES / site.namespace}" for site in sites]
        command = [sys.executable, str(relay), str(self._rtt_ms / 2000), str(self._loss), _DEVICE, *ends]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._pipe(self._process.stdout).readline() != b"ready\n":
            raise RuntimeError(f"the relay must say that it is ready, got its end instead: {' '.join(command)}")

    def start(self, sites: Sequence[Site], rate_mbit: float | None) -> None:
        """The relay has been at work since `connect`; the rate is that of the sites' own devices."""

    def cut(self, sites: Sequence[Site]) -> None:
        self._cut |= {site.address for site in sites}
        self._tell(cut=sorted(self._cut))

    def restore(self, sites: Sequence[Site]) -> None:
        self._cut -= {site.address for site in sites}
        self._tell(cut=sorted(self._cut))

    def part(self, one: Site, other: Site, apart: bool) -> None:
        pair = min(one.address, other.address), max(one.address, other.address)
        self._parted = self._parted | {pair} if apart else self._parted - {pair}
        self._tell(parted=sorted(self._parted))

    def lose(self, share: float, sites: Sequence[Site]) -> None:
        self._losses |= {site.address: share for site in sites}
        self._tell(loss=self._losses)

    def damage(self, site: Site, seed: int, mend: bool) -> None:
        self._tell(damage=site.address, seed=seed, mend=mend)

    def close(self) -> None:
        if self._process is not None:
            self._pipe(self._process.stdin).close()  # it ends with its standard input, so also when we are killed
            self._process.wait(timeout=10)
            self._pipe(self._process.stdout).close()

    def _tell(self, **order: Any) -> None:
        assert self._process is not None
        orders = self._pipe(self._process.stdin)
        orders.write(json.dumps(order).encode() + b"\n")
        orders.flush()
        self._pipe(self._process.stdout).readline()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def sweep() -> None:
    """Remove what owners that no longer live have left: their namespaces and the processes in them."""
    for name in _names():
        _, owner, started, *_ = name.removeprefix("nebula-").split("-", 3)
        if not _lives(int(owner), started):
            _remove(name)


def _names() -> list[str]:
    if not _NAMESPACES.is_dir():
        return []
    return [name for name in os.listdir(_NAMESPACES) if name.startswith(f"{_PREFIX}-") and name.count("-") >= 4]


def _own_name(what: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{what}"


def _lives(pid: int, started: str) -> bool:
    return psutil.pid_exists(pid) and _started(pid) == started


def _started(pid: int) -> str:
    """A process' start, in ticks since boot: with it a process id is never mistaken for an earlier one's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _remove(namespace: str) -> None:
    """End what still runs in a namespace, then delete it. Does nothing if there is none."""
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
    with suppress(OSError):
        _FILES.rmdir()  # unless somebody else has files there
    if not (_NAMESPACES / namespace).exists():
        return
    deadline = time.monotonic() + 5.0
    while (pids := _ip("netns", "pids", namespace).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", namespace)


def _limit(namespace: str, device: str, rate_mbit: float | None) -> None:
    if rate_mbit is not None:
        # The bucket holds what passes between two of the kernel's ticks; below that the rate is not reached.
        burst = max(32 << 10, int(rate_mbit * 1e6 / 8 / 250))
        rate = ["rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "50ms"]
        _call(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate])


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
