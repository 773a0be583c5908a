"""Who the clusters are and where their doors are."""

from __future__ import annotations

import pytest

from paddlenlp_nebula.link.addresses import doors, roster_problems

CLUSTERS = ("amber", "birch", "cedar")


@pytest.mark.parametrize(
    ("rendezvous", "found"),
    [
        ("a.org:1", {"amber": "a.org:1"}),
        ("a.org:1,b.org:2", {"amber": "a.org:1", "birch": "b.org:2"}),
        ("a.org:1,,c.org:3", {"amber": "a.org:1", "cedar": "c.org:3"}),
        ("[::1]:7,b:2,c:3", {"amber": "[::1]:7", "birch": "b:2", "cedar": "c:3"}),
        ("a.org:1,,", {"amber": "a.org:1"}),
    ],
)
def test_the_first_clusters_have_doors(rendezvous: str, found: dict[str, str]) -> None:
    assert doors(rendezvous, CLUSTERS) == found
    assert roster_problems("birch", CLUSTERS, rendezvous) == []


@pytest.mark.parametrize(
    "rendezvous",
    [
        "",
        "a.org",
        "a.org:",
        ":1",
        "a.org:0",
        "a.org:65536",
        "a.org:-1",
        "a.org:+1",
        "a.org:1.5",
        "a.org:٣",
        "http://a.org:1",
        "a b:1",
        ",b.org:2",
        "a.org:1,b.org",
        "a.org:1, b.org:2",
        "a.org:1,world",
        "a.org:1;b.org:2",
    ],
)
def test_what_is_no_address(rendezvous: str) -> None:
    (problem,) = roster_problems("amber", CLUSTERS, rendezvous)
    assert problem.startswith("rendezvous must be 'host:port'")
    assert repr(rendezvous) in problem


@pytest.mark.parametrize("rendezvous", ["a:1,a:1", "a:1,,a:1", "a:1,b:2,b:2"])
def test_two_clusters_cannot_have_one_door(rendezvous: str) -> None:
    assert roster_problems("amber", CLUSTERS, rendezvous) == [
        f"rendezvous must give each cluster an address of its own, got {rendezvous!r}"
    ]


def test_more_doors_than_clusters() -> None:
    (problem,) = roster_problems("amber", CLUSTERS, "a:1,b:2,c:3,d:4")
    assert problem == ("rendezvous must give at most one address for each of the 3 clusters, got 'a:1,b:2,c:3,d:4'")


@pytest.mark.parametrize("rendezvous", ["world", "loopback"])
def test_without_doors(rendezvous: str) -> None:
    assert roster_problems("amber", CLUSTERS, rendezvous) == []


@pytest.mark.parametrize(
    ("cluster", "clusters", "problem"),
    [
        ("delta", CLUSTERS, "cluster must be one of clusters (amber, birch, cedar), got 'delta'"),
        ("amber", ("amber", "amber"), "clusters must name each cluster once, got 'amber,amber'"),
        ("amber", ("amber", ""), "clusters must be names of 1 to 63 letters"),
        ("amber", ("amber", "a b"), "clusters must be names of 1 to 63 letters"),
        ("amber", ("amber", "x" * 64), "clusters must be names of 1 to 63 letters"),
        ("c0", tuple(f"c{i}" for i in range(65)), "clusters must name at most 64 clusters, got 65"),
    ],
)
def test_what_is_wrong_with_the_names(cluster: str, clusters: tuple[str, ...], problem: str) -> None:
    (found,) = roster_problems(cluster, clusters, "a:1")
    assert problem in found


def test_64_clusters_with_long_names() -> None:
    clusters = tuple(f"{'x' * 61}{i:02}" for i in range(64))
    assert roster_problems(clusters[63], clusters, "a:1") == []
