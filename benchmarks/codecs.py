"""The codecs' figures: bytes per parameter, GB/s on one thread and memory, next to pypiquant, PyTorch and memcpy.

    python benchmarks/codecs.py                    # everything, some minutes; 2.5 GB of memory
    python benchmarks/codecs.py --tiny --output X  # the same in seconds, for tests: its speeds mean nothing

A peer that is not installed (`pip install ".[peers]"`) is named in the result, under `not_measured`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paddlenlp_nebula.bench.codecs import CodecPlan, measure_codecs  # noqa: E402
from paddlenlp_nebula.bench.facts import facts  # noqa: E402

TINY = CodecPlan(parameters=(300_000,), repetitions=1, least_s=0.0)


def show(row: dict[str, Any]) -> None:
    feedback = "with feedback" if row["error_feedback"] else ""
    print(
        f"{row['codec']:30} {feedback:13} {row['parameters']:>11,} {row['bytes_per_parameter']:.4f} B  "
        f"encode {row['encode_gb_s']:.2f}, decode {row['decode_gb_s']:.2f}, memcpy {row['memcpy_gb_s']:.2f} GB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for tests")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "codecs.json")
    options = parser.parse_args()
    found = measure_codecs(TINY if options.tiny else CodecPlan(), show)
    result = {**facts(["python", "benchmarks/codecs.py", *sys.argv[1:]]), **found}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for entry in result["not_measured"]:
        print(f"{entry['codec']}: not measured, {entry['why']}")
    for entry in result["targets"]:
        verdict = {True: "met", False: "NOT MET", None: ""}[entry["met"]]
        value = "-" if entry["value"] is None else f"{entry['value']:.4g}"
        print(f"{entry['name']:90} {value:>8} {entry['unit']:2} {entry['target']:8} {verdict}")


if __name__ == "__main__":
    main()
