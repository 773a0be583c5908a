"""Reads and encodes the ``{"src", "tgt"}`` lines that PaddleNLP's fine-tuning uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddlenlp_nebula.errors import NebulaError

__all__ = ["encode", "load_pairs", "make_dataset"]


def load_pairs(path: Path) -> list[tuple[str, str]]:
    """The (src, tgt) pairs of a JSON-lines file; a list of one text counts as that text.

    Raises:
        NebulaError: at the first line that is not such a pair.
    """
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            source, target = (_single(content[key]) for key in ("src", "tgt"))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            shown = line if len(line) <= 80 else line[:80] + "..."
            raise NebulaError(
                f'expected {{"src": TEXT, "tgt": TEXT}} (a single round) in {path}:{number}, got {shown!r}'
            ) from None
        pairs.append((source, target))
    if not pairs:
        raise NebulaError(f'expected lines of {{"src": ..., "tgt": ...}} in {path}, found none')
    return pairs


def _single(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise ValueError
    return value


def encode(pair: tuple[str, str], tokenizer: Any, src_length: int, max_length: int) -> dict[str, list[int]]:
    """Token ids and labels of one pair; labels are shifted and -100 over the source, as PaddleNLP's criterion expects.

    Args:
        pair: source and target text.
        tokenizer: a PaddleNLP tokenizer.
        src_length: the source is cut to this many tokens, from the left.
        max_length: both together are cut to this many tokens; the target ends with ``eos`` unless cut.
    """
    source = tokenizer(
        pair[0], max_length=src_length, truncation=True, truncation_side="left", add_special_tokens=True
    )["input_ids"]
    room = max_length - len(source)
    target = tokenizer(pair[1], max_length=room, truncation=True, truncation_side="right", add_special_tokens=False)[
        "input_ids"
    ]
    if len(target) < room:
        target = [*target, tokenizer.eos_token_id]
    return {"input_ids": [*source, *target][:-1], "labels": [*([-100] * len(source)), *target][1:]}


def make_dataset(path: Path, tokenizer: Any, data_args: Any) -> Any:
    """The file as a map-style dataset of encoded pairs."""
    from paddlenlp.datasets import MapDataset

    return MapDataset(
        [encode(pair, tokenizer, data_args.src_length, data_args.max_length) for pair in load_pairs(path)]
    )
