"""One side of a link measurement: ``python -m paddlenlp_nebula.bench.peer NAME PLAN``; prints what it saw as JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from paddlenlp_nebula.bench.copies import Copy, LinkCopy, SocketCopy, connect
from paddlenlp_nebula.bench.meters import cpu_seconds, wire_bytes
from paddlenlp_nebula.bench.plan import MESSAGE_BYTES, NAMES, Plan
from paddlenlp_nebula.link.frames import checksum
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.rendezvous import open_link

__all__ = ["main"]


def main() -> None:
    name, plan = sys.argv[1], Plan.parse(sys.argv[2])
    first = name == NAMES[0]
    # Touched before anything is measured: a page that the kernel has yet to clear costs more than its copy.
    pattern = b"\1" + random.Random(name).randbytes(MESSAGE_BYTES - 1)
    source = memoryview(bytearray(pattern * plan.messages))
    target = memoryview(bytearray(b"\1" * len(source)))
    link = open_link(name, NAMES, plan.door, timeout_s=plan.timeout_s)
    connection = connect(plan.socket, listens=first, timeout_s=plan.timeout_s)
    plain = SocketCopy(connection, source, target)
    copies: dict[str, Copy] = {"socket": plain, "link": LinkCopy(link, source, target)}
    link.measure_rtt(5)
    all_gather_notes(link, {"ready": True})
    rtt_ms = {"link": 1e3 * link.rtt_s[link.peers[0]], "socket": 1e3 * plain.rtt_s(asks=first)}
    samples: list[dict[str, Any]] = []
    for repetition in range(plan.repetitions):
        for directions in (1, 2):
            for way, copy in copies.items():
                target[::MESSAGE_BYTES] = bytes(plan.messages)  # what is not written now shows in the digest
                all_gather_notes(link, {"ready": True})
                used, wire, before = cpu_seconds(), wire_bytes()[0], link.bytes_sent["BUCKET"]
                receives = directions == 2 or not first
                arrivals = copy.run(sends=directions == 2 or first, receives=receives)
                seconds = time.perf_counter() - arrivals.start
                samples.append(
                    {
                        "way": way,
                        "directions": directions,
                        "repetition": repetition,
                        "seconds": seconds,
                        "steady_bytes_s": arrivals.rate(plan.omit_s),
                        "cpu_s": {role: total - used[role] for role, total in cpu_seconds().items()},
                        "device_bytes_sent": wire_bytes()[0] - wire,
                        "link_bytes_sent": link.bytes_sent["BUCKET"] - before,
                        "digest": checksum(target) if receives else None,
                    }
                )
    connection.close()
    link.leave("the measurement is complete", deliberate=True)
    print(json.dumps({"rtt_ms": rtt_ms, "samples": samples, "sent_digest": checksum(source)}))


if __name__ == "__main__":
    main()
