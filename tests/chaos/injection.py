"""Doing a fault to the clusters, and undoing it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from paddlenlp_nebula.transport.channel import CHUNK_BYTES, CHUNKS
from tests.chaos.fleet import Cluster, Fleet
from tests.chaos.schedule import Fault
from tests.support.wan import WideArea

__all__ = ["Injector"]

_SLOW_MBIT, _LOSS = 4.0, 0.02
_FULL_BYTES = 100_000  # of a chunk that holds a round's payload


@dataclass
class Injector:
    """What does faults to the clusters.

    Attributes:
        wan: the network.
        fleet: the clusters.
        rate_mbit: of each site when nothing is wrong.
    """

    wan: WideArea
    fleet: Fleet
    rate_mbit: float

    def begin(self, fault: Fault) -> Callable[[], None] | None:
        """Do it; returns what undoes it, or None if it cannot be done now: the cluster is not running."""
        cluster, wan, what = self.fleet.clusters[fault.target[0]], self.wan, fault.what.removesuffix(" briefly")
        chance = random.Random(fault.seed)
        if cluster.job is None or cluster.job.code() is not None or not cluster.step:
            return None
        if what == "kill trainer":
            self.fleet.kill(cluster.name, fault.duration_s)
        elif what == "stop trainer":
            return _stop(psutil.Process(cluster.job.pid))
        elif what in ("kill courier", "stop courier"):
            couriers = cluster.couriers()
            if not couriers:
                return None
            courier = chance.choice(couriers)
            if what == "stop courier":
                return _stop(courier)
            courier.kill()
        elif what == "cut cluster":
            wan.cut(cluster.name)
            return lambda: wan.restore(cluster.name)
        elif what == "cut pair":
            one, other = fault.target
            wan.part(one, other)
            return lambda: wan.join(one, other)
        elif what == "slow link":
            wan.slow(_SLOW_MBIT, cluster.name)
            return lambda: wan.slow(self.rate_mbit, cluster.name)
        elif what == "lossy link":
            wan.lose(_LOSS, cluster.name)
            return lambda: wan.lose(0.0, cluster.name)
        elif what in ("damage below TCP", "damage above TCP"):
            wan.damage(cluster.name, fault.seed, mend=what == "damage above TCP")
        elif what == "damage in memory":
            if not _damage_memory(cluster, chance):
                return None
        else:
            raise ValueError(f"there is no fault {fault.what!r}")
        return lambda: None


def _stop(process: psutil.Process) -> Callable[[], None]:
    process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    return go_on


def _damage_memory(cluster: Cluster, chance: random.Random) -> bool:
    """Change a byte of what a trainer shares with one of its couriers; False if it shares nothing."""
    assert cluster.job is not None
    folder = Path(f"/proc/{cluster.job.pid}/fd")
    shared = [path for path in sorted(folder.iterdir(), key=lambda p: int(p.name)) if _is_shared(path)]
    if not shared:
        return False
    memory = os.open(chance.choice(shared), os.O_RDWR)
    at = chance.randrange(2 * CHUNKS) * CHUNK_BYTES + chance.randrange(_FULL_BYTES)
    byte = os.pread(memory, 1, at)[0] ^ chance.randrange(1, 256)
    os.pwrite(memory, bytes([byte]), at)
    os.close(memory)
    return True


def _is_shared(path: Path) -> bool:
    with suppress(OSError):
        return os.readlink(path).startswith("/memfd:nebula")
    return False
