"""Who may come in at the door: every refusal, and what is said of a run that has begun."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.admission import Facts, Refusal, arrivals, judge, run_facts
from paddlenlp_nebula.link.frames import PROTOCOL_VERSION

CLUSTERS = ("amber", "birch", "cedar")
OPEN = {"takes_back": True, "max_steps": 9}
CLOSED = {"takes_back": "restart all clusters to take it in"}


def knock(**changes: Any) -> dict[str, Any]:
    return {"cluster": "birch", "clusters": list(CLUSTERS), "protocol": PROTOCOL_VERSION, "run": None, **changes}


@pytest.mark.parametrize("present", [set(), {"cedar"}])
@pytest.mark.parametrize("facts", [None, OPEN])
def test_who_may_come_in(present: set[str], facts: Facts | None) -> None:
    assert judge(knock(), "amber", CLUSTERS, present, facts) is None


def test_a_later_cluster_has_a_door_too() -> None:
    assert judge(knock(cluster="cedar"), "birch", CLUSTERS, {"amber"}, None) is None
    assert judge(knock(cluster="amber"), "birch", CLUSTERS, set(), None) == Refusal(
        "'amber' cannot knock: clusters are amber, birch, cedar, and the earlier one keeps the door"
    )


@pytest.mark.parametrize(
    ("body", "present", "facts", "reason", "concerns_run"),
    [
        (
            knock(protocol=0),
            (),
            None,
            "'amber' speaks protocol version 1 but cluster 'birch' 0: install the same",
            True,
        ),
        (knock(protocol=None), (), OPEN, "protocol version 1 but cluster 'birch' None", False),
        (knock(protocol=0), ("birch",), None, "protocol version 1 but cluster 'birch' 0", False),
        (knock(protocol=0, cluster="zebra"), (), None, "protocol version 1 but cluster 'zebra' 0", False),
        (knock(clusters=["amber", "birch"]), (), None, "'birch' has clusters=['amber', 'birch']: set the same", True),
        (knock(clusters=list(CLUSTERS[::-1])), (), None, "in the same order, on all of them", True),
        (knock(clusters=None), (), OPEN, "has clusters=None", False),
        (knock(clusters="amber,birch,cedar"), (), None, "has clusters='amber,birch,cedar'", True),
        (knock(cluster="amber"), (), None, "'amber' cannot knock", False),
        (knock(cluster="zebra"), (), None, "'zebra' cannot knock", False),
        (knock(cluster=None), (), None, "None cannot knock", False),
        (knock(cluster=["birch"]), (), None, "['birch'] cannot knock", False),
        (knock(cluster={"a": 1}), (), OPEN, "{'a': 1} cannot knock", False),
        (knock(), ("birch",), None, "cluster 'birch' is already in the run: is it started twice?", False),
        (knock(), ("birch",), OPEN, "cluster 'birch' is already in the run", False),
        (knock(), (), CLOSED, "the run has already started without it: restart all clusters to take it in", False),
        (knock(), (), {"takes_back": 1}, "the run has already started without it: 1", False),
        ({}, (), None, "protocol version", False),
    ],
)
def test_who_may_not(
    body: dict[str, Any], present: tuple[str, ...], facts: Facts | None, reason: str, concerns_run: bool
) -> None:
    refusal = judge(body, "amber", CLUSTERS, present, facts)
    assert refusal is not None
    assert reason in refusal.reason
    assert refusal.concerns_run is concerns_run


def test_a_refusal_is_short() -> None:
    endless = "x" * 10000
    for body in (knock(cluster=endless), knock(clusters=[endless] * 10), knock(protocol=endless)):
        refusal = judge(body, "amber", CLUSTERS, (), None)
        assert refusal is not None
        assert len(refusal.reason) < 1500


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(CLUSTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(("cluster", "clusters", "protocol", "run", "x")), anything),
    st.sampled_from(CLUSTERS),
    st.sets(st.sampled_from(CLUSTERS)),
    st.sampled_from((None, OPEN, CLOSED)),
)
def test_whoever_is_let_in_is_a_later_cluster_that_is_not_there(
    body: dict[str, Any], cluster: str, present: set[str], facts: Facts | None
) -> None:
    refusal = judge({**knock(), **body}, cluster, CLUSTERS, present, facts)
    if refusal is None:
        name = body.get("cluster", "birch")
        assert CLUSTERS.index(name) > CLUSTERS.index(cluster)
        assert name not in present
        assert facts is not CLOSED
    elif refusal.concerns_run:
        assert facts is None


# Arrivals and facts


def test_arrivals() -> None:
    assert arrivals({"arrived": ["birch", "amber"]}, CLUSTERS) == ["birch", "amber"]
    assert arrivals({"arrived": []}, CLUSTERS) == []


@pytest.mark.parametrize("arrived", [None, "amber", ["zebra"], [["amber"]], {"amber": 1}, [None], 7])
def test_what_are_no_arrivals(arrived: Any) -> None:
    with pytest.raises(ProtocolError, match="must name clusters of the run, got"):
        arrivals({"arrived": arrived}, CLUSTERS)


def test_facts() -> None:
    assert run_facts({}) is run_facts({"run": None}) is None
    assert run_facts({"run": OPEN}) == OPEN
    assert run_facts({"run": CLOSED}) == CLOSED


@pytest.mark.parametrize("facts", [True, "yes", [], {}, {"max_steps": 9}, 0])
def test_what_are_no_facts(facts: Any) -> None:
    with pytest.raises(ProtocolError, match="must be described by an object with takes_back, got"):
        run_facts({"run": facts})
