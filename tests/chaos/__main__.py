"""``python -m tests.chaos [--seed N] [--steps N]``: the long version."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.chaos.play import Setting, play, problems, schedule_for
from tests.chaos.schedule import WITHOUT_RETURN
from tests.faults.jobs import Zygote


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--strategy", default="local_steps")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    setting = Setting(options.strategy, options.strategy, steps=options.steps, seed=options.seed)
    if options.kinds:
        kinds = WITHOUT_RETURN if options.kinds == "mild" else tuple(options.kinds.split(","))
        setting = replace(setting, kinds=kinds)
    zygote = Zygote("tests.chaos.trainee")
    folder = Path(tempfile.mkdtemp(prefix="nebula-chaos-"))
    schedule = schedule_for(setting)
    if options.quiet:
        schedule = []
    result = play(setting, schedule, folder, zygote, lambda s: print(s, file=sys.stderr, flush=True))
    zygote.close()
    print(folder)
    print(json.dumps(result, indent=1))
    print("\n".join(problems(result)))


if __name__ == "__main__":
    main()
