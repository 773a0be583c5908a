"""Random-k: the same elements everywhere, exactly as many as asked for, each as likely as any other."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_nebula.codec.cast import Bfloat16
from paddlenlp_nebula.codec.codec import Layout, Turn
from paddlenlp_nebula.codec.kernels.randomk import choose
from paddlenlp_nebula.codec.randomk import RandomK
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import TURN, decoded, encoded, named, normal, there_and_back

MASK = 2**64 - 1


def chosen(seed: int, numel: int, count: int) -> list[int]:
    """The places in Python's own integers: SplitMix64, strata [i n / k, (i + 1) n / k) from a random start."""
    words = []
    for i in range(1, count + 2):
        word = (seed + i * 0x9E3779B97F4A7C15) & MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        words.append((word ^ (word >> 31)) >> 32)
    start = words[0] * numel >> 32
    places = []
    for i, word in enumerate(words[1:]):
        first, last = i * numel // count, (i + 1) * numel // count
        places.append((start + first + (word * (last - first) >> 32)) % numel)
    return places


def by_kernel(seed: int, numel: int, count: int) -> list[int]:
    places = np.empty(count, dtype=np.int64)
    choose(np.uint64(seed), np.uint64(numel), places)
    return places.tolist()


@given(seed=st.integers(0, MASK), numel=st.integers(1, 5000), data=st.data())
def test_the_choice_is_the_same_on_every_machine(seed: int, numel: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, numel))
    places = by_kernel(seed, numel, count)
    assert places == chosen(seed, numel, count)
    assert len(set(places)) == count
    assert 0 <= min(places) <= max(places) < numel


def test_the_choice_stays_what_it_was() -> None:
    """Members of one run may have different versions of numpy and numba."""
    assert by_kernel(0, 1000, 5) == [969, 88, 477, 504, 748]


@pytest.mark.parametrize(("numel", "count"), [(10, 7), (10, 1), (16, 4), (9, 8)])
def test_every_element_is_as_likely_as_any_other(numel: int, count: int) -> None:
    draws = 20_000
    hits = np.zeros(numel)
    for seed in range(draws):
        hits[by_kernel(seed * 0x2545F4914F6CDD1D & MASK, numel, count)] += 1
    share = count / numel
    deviation = np.sqrt(draws * share * (1 - share))
    assert np.abs(hits - draws * share).max() < 5 * deviation


@pytest.mark.parametrize(
    ("spec", "numel", "count"),
    [
        ("randomk:0.1", 1, 1),
        ("randomk:0.1", 1000, 100),
        ("randomk:0.1", 1001, 101),
        ("randomk:0.3", 10, 3),
        ("randomk:1", 7, 7),
        ("randomk:1e-3", 258_048, 259),
    ],
)
def test_how_many(spec: str, numel: int, count: int) -> None:
    """ceil(P n) of the decimal P: 0.1 * 1000 is 100, whatever the nearest binary fraction is."""
    payload, layout = encoded(named(spec), normal(numel)), Layout.flat(numel)
    assert len(payload) == named(spec).estimate(layout) == named(spec).bound(layout) == 8 + 4 * count
    assert np.count_nonzero(decoded(named(spec), payload, layout)) == count


def test_values_stay_as_they_are_and_the_rest_is_the_error() -> None:
    vector, layout, codec = normal(5000), Layout.flat(5000), RandomK(0.1)
    error = np.empty_like(vector)
    payload = bytes(codec.encode(vector, layout, codec.init(layout), TURN, error))
    result = decoded(codec, payload, layout)
    places = np.array(chosen(TURN.shared_seed, 5000, 500))
    np.testing.assert_array_equal(result[places], vector[places])
    assert np.count_nonzero(result) == 500
    np.testing.assert_array_equal(error + result, vector)
    assert struct.unpack_from("<Q", payload) == (TURN.shared_seed,)
    np.testing.assert_array_equal(np.frombuffer(payload[8:], dtype="<f4"), vector[places])


def test_all_clusters_choose_alike_and_anew_in_each_round() -> None:
    codec, vector, layout = RandomK(0.1), normal(5000), Layout.flat(5000)

    def places(*turn: int) -> set[int]:
        return set(np.flatnonzero(decoded(codec, encoded(codec, vector, turn=Turn(*turn)), layout)))

    assert places(3, 1, 0) == places(3, 1, 1)
    assert places(3, 1, 0) != places(4, 1, 0)
    assert places(3, 1, 0) != places(3, 2, 0)
    everything = set.union(*(places(number, 0, 0) for number in range(120)))
    assert len(everything) == 5000


def test_the_other_codec_sees_a_vector_of_its_own() -> None:
    vector, layout, codec = normal(1000), Layout(((20, 40), (200,))), named("randomk:0.25+bf16")
    places = np.array(chosen(TURN.shared_seed, 1000, 250))
    payload = encoded(codec, vector, layout)
    assert payload[8:] == encoded(Bfloat16(), vector[places])
    expected = np.zeros(1000, dtype=np.float32)
    expected[places] = decoded(Bfloat16(), payload[8:], Layout.flat(250))
    np.testing.assert_array_equal(decoded(codec, payload, layout), expected)


@pytest.mark.parametrize("inner", ["topk:64/4096,4bit", "topk:3/10"])
def test_top_k_of_the_chosen(inner: str) -> None:
    """CocktailSGD's: the places that top-k sends are those of the chosen elements, in their order."""
    numel = 50_000
    vector, layout, codec = normal(numel), Layout.flat(numel), named(f"randomk:0.1+{inner}")
    places = np.array(chosen(TURN.shared_seed, numel, 5000))
    error = np.empty_like(vector)
    payload = bytes(codec.encode(vector, layout, codec.init(layout), TURN, error))
    assert payload[8:] == encoded(named(inner), vector[places])
    expected = np.zeros(numel, dtype=np.float32)
    expected[places] = there_and_back(named(inner), vector[places])
    np.testing.assert_array_equal(decoded(codec, payload, layout), expected)
    np.testing.assert_array_equal(error, vector - expected)
    assert 0 < np.count_nonzero(expected) < 0.4 * 5000


def test_decoding_says_what_is_wrong() -> None:
    with pytest.raises(ProtocolError, match=r"9 elements as randomk:0\.1 must be at least 8 bytes, got 7"):
        decoded(RandomK(0.1), bytes(7), Layout.flat(9))
    sentence = r"25 elements as randomk:0\.1, after 8 bytes: 3 elements as fp32 must be 12 bytes, got 1"
    with pytest.raises(ProtocolError, match=sentence):
        decoded(RandomK(0.1), bytes(9), Layout.flat(25))


@pytest.mark.parametrize(
    ("spec", "short"),
    [
        ("randomk:0.10", "randomk:0.1"),
        ("randomk:1.0", "randomk:1"),
        ("randomk:0.1+fp32", "randomk:0.1"),
        ("randomk:0.1+bf16", "randomk:0.1+bf16"),
    ],
)
def test_specs(spec: str, short: str) -> None:
    assert named(spec).spec == short
    assert named(spec).lossless is (short == "randomk:1")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            spec,
            rf"sync_codec must be randomk:P\[\+CODEC\], got '{spec}': P must be one number, more than 0 and at most 1",
        )
        for spec in ("randomk", "randomk:", "randomk:0", "randomk:1.01", "randomk:nan", "randomk:0.1,fp32", "randomk:x")
    ]
    + [
        ("bf16+fp16", r"sync_codec must have randomk:P\[\+CODEC\] before a '\+', got 'bf16\+fp16'"),
        ("randomk:0.1+", r"after '\+', sync_codec must be one of fp32, .*, got ''"),
        ("randomk:0.1+fp64", r"after '\+', sync_codec must be one of fp32, .*, got 'fp64'"),
        ("randomk:0.1+bf16:1", r"after '\+', sync_codec must be bf16, got 'bf16:1': bf16 takes no options"),
        ("randomk:0.1+bf16+bf16", r"after '\+', sync_codec must be one of fp32, .*, got 'bf16\+bf16'"),
    ],
)
def test_other_specs_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        named(spec)


@pytest.mark.parametrize("inner", ["lowrank:4", "randomk:0.5", "dgc:0.01"])
def test_what_remembers_matrices_or_elements_cannot_follow(inner: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"after '\+', sync_codec must be one of fp32, .*, got '{inner}'"
    ) as caught:
        named(f"randomk:0.1+{inner}")
    assert inner.partition(":")[0] not in str(caught.value).partition(", got")[0]
