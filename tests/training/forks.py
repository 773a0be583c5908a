"""Runs many short trainings, each cluster of each in a fresh process, and imports Paddle only once.

    python forks.py CASES.json OUT_FOLDER

A case is a list of specs that are run one after the other (a killed training and the one that resumes from it),
see `worker.run`; its clusters are forked from this process for each of them. Several cases run at a time, since
clusters that meet wait more than they compute.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from jobs import free_port
from worker import perform

from paddlenlp_nebula.codec.codec import Layout
from paddlenlp_nebula.codec.registry import codec_from_spec

_AT_A_TIME = 3
_LAYOUT = Layout(((64, 64),))
_LONGEST_S = 120


def start(spec: dict, cluster: str, out: Path) -> int:
    """Fork a cluster's process; returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.alarm(_LONGEST_S)  # ends it
        log = os.open(out / f"{spec['name']}.{cluster}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        perform(spec, cluster, out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an interpreter with Paddle takes seconds to end otherwise
    raise AssertionError


def main(path: str, folder: str) -> None:
    out = Path(folder)
    waiting = [list(case) for case in json.loads(Path(path).read_text())]
    for codec in {spec.get("nebula", {}).get("sync_codec", "fp32") for case in waiting for spec in case}:
        codec_from_spec(codec).init(_LAYOUT)  # imports its kernels
    gc.freeze()  # a child's collector would copy every page that holds an object
    under_way: list[tuple[set[int], list[dict]]] = []
    while waiting or under_way:
        while waiting and len(under_way) < _AT_A_TIME:
            case = waiting.pop(0)
            under_way.append((begin(case, out), case))
        pid, _ = os.wait()
        for running, case in list(under_way):
            running.discard(pid)
            if not running:
                under_way.remove((running, case))
                if case:
                    under_way.append((begin(case, out), case))


def begin(case: list[dict], out: Path) -> set[int]:
    """Start the next spec of a case: all its clusters, or the ``jobs`` that it names instead."""
    spec = {**case.pop(0), "rendezvous": f"127.0.0.1:{free_port()}"}
    return {start(spec, job, out) for job in spec.get("jobs", spec["clusters"])}


if __name__ == "__main__":
    main(*sys.argv[1:])
