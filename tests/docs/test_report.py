"""docs/report.md names each field of the report."""

from __future__ import annotations

import re
from dataclasses import fields

from paddlenlp_nebula.ledger.ledger import Ledger, Round
from tests.docs.pages import REPO


def test_each_field_is_explained() -> None:
    page = (REPO / "docs" / "report.md").read_text(encoding="utf-8")
    top, rounds = page.split("In `per_round`:")
    explained = [{name for cell in _cells(part) for name in re.findall(r"`(\w+)`", cell)} for part in (top, rounds)]
    facts = set(Ledger().report()) | {"cluster", "clusters", "parameters_selected", "parameters_total", "max_steps"}
    assert facts - explained[0] == set()
    assert {field.name for field in fields(Round)} == explained[1]


def _cells(part: str) -> list[str]:
    """The first cell of each row."""
    return [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
