"""Doing a fault to the clusters, and undoing it."""

from __future__ import annotations

import os
import random
import signal
import time
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
_SAMPLE_BYTES = 200  # of each chunk: its first frame's header, and some of its payload


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
    rate_mbit: float | None

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
    """Change a byte that waits in memory for a courier to send it; False if none came to wait there.

    The couriers are held up meanwhile: what the trainer hands over in that time is what is new in their memory.
    """
    assert cluster.job is not None
    folder = Path(f"/proc/{cluster.job.pid}/fd")
    couriers = cluster.couriers()
    memories = [os.open(path, os.O_RDWR) for path in folder.iterdir() if _is_shared(path)]
    before = [_outgoing(memory) for memory in memories]
    for courier in couriers:
        courier.suspend()
    try:
        for _ in range(40):
            time.sleep(0.05)
            for memory, old in zip(memories, before, strict=True):
                fresh = [at for at, byte in _outgoing(memory).items() if byte != old[at]]
                if fresh:
                    at = chance.choice(fresh)
                    os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ chance.randrange(1, 256)]), at)
                    return True
        return False
    finally:
        for courier in couriers:
            with suppress(psutil.NoSuchProcess):
                courier.resume()
        for memory in memories:
            os.close(memory)


def _outgoing(memory: int) -> dict[int, int]:
    """Place -> byte: samples of the outgoing half of what a trainer shares with a courier."""
    return {
        slot * CHUNK_BYTES + at: byte
        for slot in range(CHUNKS)
        for at, byte in enumerate(os.pread(memory, _SAMPLE_BYTES, slot * CHUNK_BYTES))
    }


def _is_shared(path: Path) -> bool:
    with suppress(OSError):
        return os.readlink(path).startswith("/memfd:nebula")
    return False
