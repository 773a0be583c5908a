"""The command line, see the package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ["FLAGS_use_stride_kernel"] = "0"  # noqa: SIM112 - its transposed views make the attention a third slower on a CPU

from benchmarks import quality as package
from benchmarks.quality.plan import CLUSTERS, SEED, Run, confirmed, searched, work
from benchmarks.quality.results import Results
from benchmarks.quality.setting import Setting
from benchmarks.quality.show import STARTS, plot, table
from benchmarks.quality.training import Training

HERE = Path(__file__).parent
TINY = Training(
    width=16, depth=1, heads=2, context=16, steps=12, windows=2, warm_up=2, evaluation=32, points=3, sample=True
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m benchmarks.quality",
    )
    parser.add_argument("command", choices=("search", "confirm", "run", "table", "plot"))
    parser.add_argument("settings", nargs="*", help="for run: settings, each one argument")
    parser.add_argument("--start", choices=(*STARTS, "both"), default="both", help="only runs from this one")
    parser.add_argument("--clusters", type=int, default=CLUSTERS, help="for run")
    parser.add_argument("--seed", type=int, default=SEED, help="for run")
    parser.add_argument("--tiny", action="store_true", help="sizes for tests: the figures mean nothing")
    parser.add_argument("--output", type=Path, default=HERE.parent / "results" / "quality.json")
    parser.add_argument("--checkpoints", type=Path, default=HERE.parents[1] / "runs" / "quality")
    options = parser.parse_intermixed_args()
    training = TINY if options.tiny else Training()
    results = Results(options.output, training)
    if options.command == "table":
        print("\n".join(table(results.rows())))
    elif options.command == "plot":
        plot(results.rows(), options.output.with_suffix(".png"), CLUSTERS, SEED)
    else:
        starts = STARTS if options.start == "both" else (options.start,)

        def asked() -> list[Run]:
            if options.command == "search":
                return searched()
            if options.command == "confirm":
                return confirmed(results)
            settings = [Setting.parse(text) for text in options.settings]
            return [Run(setting, start, options.clusters, options.seed) for setting in settings for start in STARTS]

        work(results, training, options.checkpoints, lambda: [run for run in asked() if run.start in starts])


if __name__ == "__main__":
    main()
