"""A student in a process of its own: ``python -m tests.distill.pupil NAME WHERE FOLDER BATCHES STEP_S``.

Or its teacher, as NAME ``amber``, which takes STEP_S for an answer. FOLDER holds throw-away certificates. A student says how many batches had the right answers, and the figures, in JSON, at the end;
a dot after each batch before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from paddlenlp_nebula.distill.client import Client
from paddlenlp_nebula.distill.service import Service
from paddlenlp_nebula.distill.tutor import Manners, Tutor
from paddlenlp_nebula.link.star import open_star
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.throwaway import thrown_away

from .school import answer, batch, labels, offer, wish


def main(name: str, where: str, folder: str, batches: str, step_s: str) -> None:
    identity = Identity(thrown_away(name, Path(folder)))
    star = open_star(name, ("amber", "birch", "cedar"), where, timeout_s=30, report=print, identity=identity)
    if name == "amber":
        Service(star, offer(), lambda asked: answer(asked, seconds=float(step_s)), report=print).serve()
        return
    client, right = Client([Tutor(star, wish(), Manners())]), 0
    client.meet(30)
    for number, answers in client.accompany(range(int(batches)), batch):
        told = answers["amber"]
        right += told is not None and bool(np.array_equal(told["labels"], labels(batch(number))))
        sys.stdout.write(".\n")
        sys.stdout.flush()
        time.sleep(float(step_s))
    client.leave("it has learnt enough", deliberate=True)
    sys.stdout.write(json.dumps({"right": right, **client.report()["amber"]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
