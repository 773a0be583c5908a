"""One process of one cluster of ``nebula run``.

    python -m paddlenlp_nebula.recipe.worker [--alone] [--check-into FILE] RECIPE [OVERRIDES...]

``--check-into`` only checks the configuration and writes what the command needs to know about it, as JSON.
That happens in a process of its own so that the command itself stays free of Paddle: of its seconds of import,
its memory, its GPU contexts and its signal handlers.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Started by path (paddle.distributed.launch does that), this folder would be searched before everything else.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]

import json
import os

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.recipe.config import load_configuration

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Run or check a recipe; returns the exit code."""
    alone, check_into = False, None
    while words and words[0] in ("--alone", "--check-into"):
        if words.pop(0) == "--alone":
            alone = True
        else:
            check_into = Path(words.pop(0))
    if not words:
        print("a recipe must be named, got nothing", file=sys.stderr)
        return 2
    recipe, *overrides = words
    if check_into is not None:
        _check(recipe, overrides, check_into)
        return 0
    try:
        configuration = load_configuration(recipe, overrides)
        configuration.recipe.run(configuration.arguments, configuration.nebula, alone=alone)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _check(recipe: str, overrides: list[str], into: Path) -> None:
    answer: dict[str, object] = {"problems": []}
    try:
        configuration = load_configuration(recipe, overrides)
        answer["recipe"] = configuration.recipe.name
        answer["output_dir"] = os.path.expanduser(str(configuration.value("output_dir", "")))
        answer["max_steps"] = configuration.value("max_steps")
        answer["compare_alone"] = bool(configuration.value("compare_alone", False))
    except ConfigurationError as error:
        answer["problems"] = list(error.problems)
    into.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
