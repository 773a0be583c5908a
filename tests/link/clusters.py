"""Clusters as threads of this process: links over loopback, and what becomes of each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.transport.channel import Channel
from paddlenlp_nebula.transport.loopback import loopback_pair

NAMES = ("amber", "birch", "cedar", "delta")


def meet(*names: str, timeout_s: float = 5.0, chunk_bytes: int = 4096, chunks: int = 4) -> dict[str, Link]:
    """A link for each cluster, joined with all others."""
    channels: dict[str, dict[str, Channel]] = {name: {} for name in names}
    for a, b in itertools.combinations(names, 2):
        channels[a][b], channels[b][a] = loopback_pair(a, b, chunk_bytes, chunks)
    return {name: Link(name, names, channels[name], timeout_s=timeout_s) for name in names}


def at_once(work: Mapping[str, Callable[[], Any]], timeout_s: float = 30.0) -> dict[str, Any]:
    """Run each cluster's work in a thread; name -> its result, or the exception that ended it."""
    outcomes: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            outcomes[name] = work[name]()
        except BaseException as error:
            outcomes[name] = error

    threads = [threading.Thread(target=run, args=(name,), name=name, daemon=True) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    hung = [thread.name for thread in threads if thread.is_alive()]
    assert not hung, f"hung: {hung}"
    return {name: outcomes[name] for name in work}


def everyone(links: Mapping[str, Link], act: Callable[[Link], Any]) -> dict[str, Any]:
    """The same act on every link at once; fails with all that went wrong."""
    outcomes = at_once({name: lambda link=link: act(link) for name, link in links.items()})
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    assert not errors, errors
    return outcomes
