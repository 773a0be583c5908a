"""The long version: ``python -m tests.chaos [--seed N] [--only local_steps] [--json PATH]``, or ``make chaos``.

Prints what happens as it happens, then the table of figures; ends with 1 if anything is wrong with the product. The
same seed makes the same schedule.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos import goodput
from tests.chaos.figures import gap_percent, table
from tests.chaos.play import Setting, play, problems, schedule_for
from tests.faults.jobs import ROOT, Zygote
from tests.support.wan import available

SETTINGS = (
    Setting("local_steps", "local_steps", steps=3000),
    Setting("every_step", "every_step", steps=1500),
)
LOSS_GAP_PERCENT = 2.0
_NAMES = [*(setting.name for setting in SETTINGS), "goodput"]


def say(sentence: str) -> None:
    sys.stderr.write(f"{datetime.datetime.now():%H:%M:%S} {sentence}\n")
    sys.stderr.flush()


def under_faults(setting: Setting, folder: Path, zygote: Zygote) -> dict[str, Any]:
    """A setting with all its faults, and what it loses by them."""
    say(f"{setting.name}, seed {setting.seed}, undisturbed")
    quiet = play(setting.undisturbed, [], folder / "undisturbed", zygote, say)
    say(f"{setting.name}, seed {setting.seed}")
    result = play(setting, schedule_for(setting), folder / "chaos", zygote, say)
    del result["timeline"]
    result["undisturbed_loss"] = quiet["loss"]
    result["loss_gap_percent"] = gap_percent(result["loss"], quiet["loss"])
    found = [*problems(quiet), *problems(result)]
    if result["loss_gap_percent"] is None or result["loss_gap_percent"] > LOSS_GAP_PERCENT:
        found.append(f"the loss is {result['loss']}, undisturbed {quiet['loss']}")
    return {**result, "problems": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=_NAMES, help="one setting instead of all")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the setting's own")
    parser.add_argument("--kinds", help="of faults, comma-separated, instead of all")
    parser.add_argument(
        "--overlap", type=float, default=0.15, help="share of the faults that do not wait for the last one"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/chaos.json", help="where figures go")
    options = parser.parse_args()
    if reason := available(delay=True):
        sys.stderr.write(f"chaos cannot be had here: {reason}\n")
        return 2

    changes: dict[str, Any] = {"seed": options.seed, "overlap": options.overlap}
    if options.steps:
        changes["steps"] = options.steps
    if options.kinds:
        changes["kinds"] = tuple(options.kinds.split(","))
    folder = Path(tempfile.mkdtemp(prefix="nebula-chaos-"))
    say(f"what the clusters leave behind is in {folder}")
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    zygote = Zygote("tests.chaos.trainee")
    try:
        for name in [options.only] if options.only else _NAMES:
            began = time.time()
            if name == "goodput":
                run = goodput.measure(replace(goodput.SETTING, **changes), folder / name, zygote, say)
            else:
                (setting,) = (setting for setting in SETTINGS if setting.name == name)
                run = under_faults(replace(setting, **changes), folder / name, zygote)
            run |= {"date": f"{datetime.date.today()}", "cpus": len(os.sched_getaffinity(0))}
            run["wall_s"] = round(time.time() - began)
            found[name] = run
            options.json.write_text(json.dumps(found, indent=1) + "\n")
            for problem in run["problems"]:
                say(f"{name}, seed {options.seed}: {problem}")
    finally:
        zygote.close()
    sys.stdout.write(table(found) + "\n")
    return int(any(found[name]["problems"] for name in ([options.only] if options.only else _NAMES)))


if __name__ == "__main__":
    sys.exit(main())
