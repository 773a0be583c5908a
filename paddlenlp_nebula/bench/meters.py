"""What a process, its couriers and its network have used so far, from the kernel's own counters (Linux)."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["couriers", "cpu_seconds", "forget_peak", "memory", "wire_bytes"]

_COURIER = "paddlenlp_nebula.transport.courier_process"


def couriers() -> list[psutil.Process]:
    """The couriers of this process, without the mpiexecs that started them."""
    below = psutil.Process().children(recursive=True)
    return [child for child in below if _COURIER in child.cmdline() and "python" in child.name()]


def cpu_seconds() -> dict[str, float]:
    """Seconds of computing, system calls included, of this process ("leader") and its couriers ("courier")."""
    groups = {"leader": [psutil.Process()], "courier": couriers()}
    return {
        role: sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        for role, processes in groups.items()
    }


def wire_bytes() -> tuple[int, int]:
    """Bytes that all network devices of this process' namespace have sent and received, loopback included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = [[int(word) for word in line.partition(":")[2].split()] for line in lines]
    return sum(count[8] for count in counts), sum(count[0] for count in counts)


def memory(pid: int | None = None) -> dict[str, int]:
    """Bytes resident: now (``rss``), at most so far (``peak``), and the part shared with others (``shared``)."""
    status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text().splitlines()
    values = {line.partition(":")[0]: line.split() for line in status}
    fields = {"rss": "VmRSS", "peak": "VmHWM", "shared": "RssShmem"}
    return {name: 1024 * int(values[field][1]) for name, field in fields.items()}


def forget_peak() -> None:
    """Let this process' ``peak`` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
