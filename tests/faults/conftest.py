"""The stage that faults are played on, once per run, and the book of what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.figures import Book
from tests.faults.jobs import Stage, Zygote
from tests.support.wan import WideArea, available, wide_area


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """What the trainers are forked from."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def wan() -> Iterator[WideArea]:
    """Two sites, 100 Mbit/s apart, each with a network of its own."""
    if reason := available():
        pytest.skip(reason)
    with wide_area(("west", "east"), rate_mbit=100) as wan:
        yield wan


@pytest.fixture(scope="session")
def stage(zygote: Zygote, wan: WideArea) -> Stage:
    """Two clusters at two sites."""
    return Stage(zygote, wan)


@pytest.fixture(scope="session")
def one_machine(zygote: Zygote) -> Stage:
    """Two clusters on this machine as it is, over real TCP: needs no root."""
    return Stage(zygote, None)


@pytest.fixture(scope="session")
def book() -> Iterator[Book]:
    """Where measured seconds are written down."""
    book = Book()
    yield book
    book.write()
