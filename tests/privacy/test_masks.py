"""Masks: they cancel, they are never used twice, and what they hide looks like noise to any two members."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chi2

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.notes import pack_note
from paddlenlp_nebula.privacy.masks import Masks

from ..link.clusters import NAMES, at_once, everyone, meet

COUNT = 20_000
PRIVATE = {name: X25519PrivateKey.from_private_bytes(bytes([i + 1]) * 32) for i, name in enumerate(NAMES)}


def masks(members: int, epoch: int = 0) -> dict[str, Masks]:
    keys = {name: PRIVATE[name].public_key().public_bytes_raw() for name in NAMES[:members]}
    return {name: Masks(name, keys, PRIVATE[name], epoch) for name in keys}


def mask(of: Masks, number: int = 1, part: int = 0, dtype: str = "<u4") -> np.ndarray:
    vector = np.zeros(COUNT, dtype)
    copy.copy(of).add(vector, number, part)
    return vector


def looks_uniform(vector: np.ndarray) -> bool:
    """The chi-square test on bytes; False for random ones once in a billion."""
    counts = np.bincount(vector.view(np.uint8), minlength=256)
    expected = vector.nbytes / 256
    return bool(((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-9, 255))


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_masks_cancel_in_the_sum_over_all_members_and_in_no_other(members: int, dtype: str) -> None:
    all_of = [mask(of, dtype=dtype) for of in masks(members).values()]
    assert not sum(all_of, np.zeros(COUNT, dtype)).any()
    for count in range(1, members):
        for some in itertools.combinations(all_of, count):
            assert looks_uniform(sum(some, np.zeros(COUNT, dtype)))


def test_rounds_buckets_epochs_and_members_have_masks_of_their_own() -> None:
    found = [
        mask(masks(4, epoch)[member], number, part).tobytes()
        for epoch in (0, 1)
        for member in NAMES
        for number in (1, 2, 2**40)
        for part in (0, 1)
    ]
    assert len(set(found)) == len(found) == 48
    for one, other in itertools.combinations(found[::7], 2):
        assert looks_uniform(np.frombuffer(one, "<u4") - np.frombuffer(other, "<u4"))


def test_another_member_list_has_other_masks_though_keys_and_epoch_be_the_same() -> None:
    assert (mask(masks(3)["amber"]) != mask(masks(4)["amber"])).mean() > 0.99


def test_members_that_have_seen_different_keys_share_no_mask() -> None:
    keys = {name: PRIVATE[name].public_key().public_bytes_raw() for name in NAMES[:3]}
    lied_to = {**keys, "cedar": PRIVATE["delta"].public_key().public_bytes_raw()}
    found = []
    for member, seen in (("amber", keys), ("birch", keys), ("birch", lied_to)):
        of = Masks(member, seen, PRIVATE[member], 0)
        of._pairs = [pair for pair in of._pairs if pair[1] == b"amber,birch"]
        found.append(mask(of))
    assert not (found[0] + found[1]).any()
    assert looks_uniform(found[0] + found[2])


def test_what_is_sent_looks_random_though_two_others_compare_all_they_know() -> None:
    """Amber and birch take the masks that they share with cedar out of what it sends; delta's remains."""
    of = masks(4)
    plain = np.full(COUNT, 12345, "<u4")
    sent = plain + mask(of["cedar"])
    assert looks_uniform(sent)
    for member in ("amber", "birch"):
        shared = copy.copy(of[member])
        shared._pairs = [pair for pair in shared._pairs if b"cedar" in pair[1]]
        sent = sent + mask(shared)
        assert looks_uniform(sent)
    shared = copy.copy(of["delta"])
    shared._pairs = [pair for pair in shared._pairs if b"cedar" in pair[1]]
    assert (sent + mask(shared) == plain).all()  # the test takes out the right ones


@pytest.mark.parametrize(("number", "part"), [(3, 2), (3, 1), (2, 9)])
def test_no_mask_is_used_twice(number: int, part: int) -> None:
    of = masks(3)["amber"]
    of.add(np.zeros(1, "<u4"), 3, 2)
    with pytest.raises(NebulaError, match=f"must be used once, and in order, got round {number}, part {part}"):
        of.add(np.zeros(1, "<u4"), number, part)
    of.add(np.zeros(1, "<u4"), 3, 3)


def test_members_agree_over_a_link_on_fresh_keys_each_time() -> None:
    links = meet(*NAMES[:3])
    found = []
    for number in (1, 2):
        agreed = everyone(links, lambda link, number=number: Masks.agree(link, number))
        vectors = [mask(of) for of in agreed.values()]
        assert not sum(vectors, np.zeros(COUNT, "<u4")).any()
        found += [vector.tobytes() for vector in vectors]
    assert len(set(found)) == 6


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ({}, "must be hexadecimal, got {}"),
        ({"mask_key": 7}, "must be hexadecimal"),
        ({"mask_key": "xyz"}, "must be hexadecimal"),
        ({"mask_key": "00"}, "must be a point of X25519, got 00"),
        ({"mask_key": "00" * 32}, "must be a point of X25519"),  # the secret would be known to all
    ],
)
def test_whoever_gives_no_key_is_no_member(note: dict[str, Any], words: str) -> None:
    links = meet(*NAMES[:2])

    def lie() -> None:
        links["birch"].post(Kind.NOTE, pack_note(note), round=1)
        links["birch"].flush()

    outcomes = at_once({"amber": lambda: Masks.agree(links["amber"], 1), "birch": lie})
    assert isinstance(outcomes["amber"], PeerLost)
    assert outcomes["amber"].peer == "birch"
    assert words in outcomes["amber"].reason
