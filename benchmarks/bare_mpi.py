"""What MPI alone carries between two jobs on this machine: no leader, no courier, no framing, no checksum.

    mpiexec -n 1 python benchmarks/bare_mpi.py west PLAN & mpiexec -n 1 python benchmarks/bare_mpi.py east PLAN

Chunks of the link's size and as many in flight, over TCP as between couriers; next to a plain socket between the
same two processes. No link over MPI can cost less than this, plus what its leaders do to every byte.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paddlenlp_nebula.bench.copies import Arrivals, Copy, SocketCopy, buffers, connect, take_samples
from paddlenlp_nebula.bench.link import check_digests, rates, run_sides
from paddlenlp_nebula.bench.plan import MESSAGE_BYTES, NAMES, Plan
from paddlenlp_nebula.link.frames import HEADER_BYTES, checksum
from paddlenlp_nebula.transport.channel import CHUNK_BYTES, CHUNKS
from paddlenlp_nebula.transport.launch import courier_environment, find_mpiexec
from paddlenlp_nebula.transport.rings import cut

if TYPE_CHECKING:
    import socket

    from mpi4py import MPI

__all__ = ["measure_bare_mpi"]

_PAUSE_S = 0.2e-3  # between two looks at MPI of which the first found nothing


def measure_bare_mpi(plan: Plan) -> dict[str, Any]:
    """Rates and CPU seconds per GB of bare MPI and of a plain socket, and what they leave for a link on this machine.

    Returns:
        ``rates`` as in `paddlenlp_nebula.bench.link`; ``leader_cpu_s_per_gb``: what two leaders need for copies and
        checksums alone; and in each row ``least_cpu_s_per_gb``: bare MPI and that together, with ``bound_mb_s``, the
        rate at which it keeps all cores busy, and ``bound_share``, that rate's share of the plain socket's.
    """
    command = [*find_mpiexec(), "-n", "1", sys.executable, __file__]
    environment = courier_environment({**os.environ, "MPIR_CVAR_NOLOCAL": "1"})
    seen = run_sides({name: [*command, name, plan.text()] for name in NAMES}, environment)
    check_digests(seen)
    rows = rates(plan, seen, ("mpi", "socket"))
    leaders = leader_cpu_s_per_gb(plan.messages)
    for row in rows:
        row["least_cpu_s_per_gb"] = sum(row["mpi_cpu_s_per_gb"].values()) + sum(leaders.values())
        row["bound_mb_s"] = 1e3 * len(os.sched_getaffinity(0)) / row["least_cpu_s_per_gb"] / row["directions"]
        row["bound_share"] = row["bound_mb_s"] / row["socket_mb_s"]
    return {"rates": rows, "leader_cpu_s_per_gb": leaders}


def leader_cpu_s_per_gb(messages: int, repetitions: int = 3) -> dict[str, float]:
    """CPU seconds per GB of a leader's own work on a payload: checksum and copy into a chunk, and the same back.

    The least of some repetitions: nothing else uses the caches meanwhile.
    """
    source, target = buffers(NAMES[0], messages)
    parts = [slice(at, at + MESSAGE_BYTES) for at in range(0, len(source), MESSAGE_BYTES)]
    ring = memoryview(bytearray(b"\1" * (CHUNKS * CHUNK_BYTES)))
    bodies = [chunk[HEADER_BYTES : HEADER_BYTES + MESSAGE_BYTES] for chunk in cut(ring, CHUNKS, CHUNK_BYTES)]
    least = {"send": float("inf"), "receive": float("inf")}
    for _ in range(repetitions):
        start = time.process_time()
        for part, body in zip(parts, cycle(bodies), strict=False):
            checksum(source[part])
            body[:] = source[part]
        middle = time.process_time()
        for part, body in zip(parts, cycle(bodies), strict=False):
            checksum(body)
            target[part] = body
        end = time.process_time()
        for way, seconds in (("send", middle - start), ("receive", end - middle)):
            least[way] = min(least[way], seconds / (len(source) / 1e9))
    return least


class MpiCopy(Copy):
    """Through MPI: synchronous sends from one buffer, receives into the other one."""

    def __init__(self, comm: MPI.Intercomm, connection: socket.socket, source: memoryview, target: memoryview) -> None:
        super().__init__(source, target)
        self._comm = comm
        self._connection = connection

    def run(self, *, sends: bool, receives: bool) -> Arrivals:
        from mpi4py import MPI

        parts = [slice(at, at + MESSAGE_BYTES) for at in range(0, len(self.source), MESSAGE_BYTES)]
        outgoing, incoming = iter(parts if sends else ()), iter(parts if receives else ())
        requests = [MPI.REQUEST_NULL] * (2 * CHUNKS)
        arrivals, got = Arrivals(), 0

        def start(slot: int) -> None:
            if slot < CHUNKS and (part := next(outgoing, None)) is not None:
                requests[slot] = self._comm.Issend([self.source[part], MESSAGE_BYTES, MPI.BYTE], 0)
            elif slot >= CHUNKS and (part := next(incoming, None)) is not None:
                requests[slot] = self._comm.Irecv([self.target[part], MESSAGE_BYTES, MPI.BYTE], 0)

        for slot in range(2 * CHUNKS):
            start(slot)
        while (done := MPI.Request.Testsome(requests)) is not None:  # None: nothing is left
            for slot in done:
                if slot >= CHUNKS:
                    got += MESSAGE_BYTES
                    arrivals.note(got)
                start(slot)
            if not done:
                time.sleep(_PAUSE_S)
        self._connection.sendall(b".")
        self._connection.recv(1)
        return arrivals


def main() -> None:
    """One side; prints what it saw as JSON."""
    name, plan = sys.argv[1], Plan.parse(sys.argv[2])
    first = name == NAMES[0]
    from mpi4py import MPI

    source, target = buffers(name, plan.messages)
    connection = connect(plan.socket, listens=first, timeout_s=plan.timeout_s)
    if first:
        port = MPI.Open_port()
        connection.sendall(port.encode())
        comm = MPI.COMM_SELF.Accept(port)
    else:
        comm = MPI.COMM_SELF.Connect(connection.recv(4096).decode())
    plain = SocketCopy(connection, source, target)
    samples = take_samples(
        name,
        plan,
        {"socket": plain, "mpi": MpiCopy(comm, connection, source, target)},
        ready=lambda: plain.rtt_s(asks=first, times=2),
        cpu_seconds=lambda: {"process": time.process_time()},
    )
    comm.Disconnect()
    print(json.dumps({"samples": samples, "sent_digest": checksum(source)}), flush=True)


if __name__ == "__main__":
    main()
