"""One side of a link measurement: ``python -m paddlenlp_nebula.bench.peer NAME PLAN``; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paddlenlp_nebula.bench.copies import LinkCopy, SocketCopy, buffers, connect, take_samples
from paddlenlp_nebula.bench.meters import cpu_seconds
from paddlenlp_nebula.bench.plan import NAMES, Plan
from paddlenlp_nebula.link.frames import checksum
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.rendezvous import open_link
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.throwaway import thrown_away

__all__ = ["main"]


def main() -> None:
    name, plan = sys.argv[1], Plan.parse(sys.argv[2])
    first = name == NAMES[0]
    source, target = buffers(name, plan.messages)
    identity = Identity(thrown_away(name, Path(plan.certificates))) if plan.certificates else None
    link = open_link(name, NAMES, plan.door, timeout_s=plan.timeout_s, identity=identity)
    connection = connect(plan.socket, listens=first, timeout_s=plan.timeout_s)
    plain = SocketCopy(connection, source, target)
    link.measure_rtt(5)
    all_gather_notes(link, {"ready": True})
    rtt_ms = {"link": 1e3 * link.rtt_s[link.peers[0]], "socket": 1e3 * plain.rtt_s(asks=first)}
    samples = take_samples(
        name,
        plan,
        {"socket": plain, "link": LinkCopy(link, source, target)},
        ready=lambda: all_gather_notes(link, {"ready": True}),
        cpu_seconds=cpu_seconds,
    )
    connection.close()
    link.leave("the measurement is complete", deliberate=True)
    print(json.dumps({"rtt_ms": rtt_ms, "samples": samples, "sent_digest": checksum(source)}))


if __name__ == "__main__":
    main()
