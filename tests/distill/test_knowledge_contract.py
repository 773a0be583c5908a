"""What every kind of knowledge must do, over the whole table."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.distill.knowledge.knowledge import Extent, Knowledge
from paddlenlp_nebula.distill.knowledge.registry import KNOWLEDGE, knowledge_from_spec, spec_of
from paddlenlp_nebula.errors import ConfigurationError, NebulaError, ProtocolError
from tests.distill.knowledge_table import EXTENT, EXTENTS, SPECS, arrays_of, named

every_kind = pytest.mark.parametrize("kind", [named(spec) for spec in SPECS], ids=SPECS)
every_extent = pytest.mark.parametrize("extent", EXTENTS, ids=lambda extent: f"{extent.rows}x{extent.vocabulary}")


def encoded(kind: Knowledge, extent: Extent, seed: int = 0) -> bytes:
    return bytes(kind.encode(arrays_of(kind, extent, seed), extent))


def test_the_table_covers_every_family() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(KNOWLEDGE)


@every_kind
@every_extent
def test_round_trip(kind: Knowledge, extent: Extent) -> None:
    arrays = arrays_of(kind, extent)
    before = {name: array.copy() for name, array in arrays.items()}
    payload = kind.encode(arrays, extent)
    assert payload.nbytes <= kind.bound(extent)
    result = kind.decode(memoryview(bytes(payload)), extent)
    assert tuple(result) == kind.names()
    for name, array in result.items():
        np.testing.assert_array_equal(arrays[name], before[name])  # encoding changes nothing
        assert (array.shape, array.dtype) == (arrays[name].shape, arrays[name].dtype)
        assert np.isfinite(array).all()
        if array.dtype == np.int32 and name != "ids":
            np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("logits")])
@every_extent
def test_what_was_decoded_is_encoded_to_the_same_bytes(spec: str, extent: Extent) -> None:
    """So that an answer that is passed on does not drift; making a sum 1 again moves logits by their rounding."""
    kind = named(spec)
    payload = encoded(kind, extent)
    assert bytes(kind.encode(kind.decode(memoryview(payload), extent), extent)) == payload


@every_kind
def test_estimate(kind: Knowledge) -> None:
    extent = Extent(rows=400, samples=20, vocabulary=5000, width=48, longest=20)
    payload = encoded(kind, extent)
    if kind.spec == "sequence":
        assert len(payload) <= kind.estimate(extent)  # as long as can be
    else:
        assert len(payload) == pytest.approx(kind.estimate(extent), rel=0.01)


@every_kind
@every_extent
def test_a_payload_of_another_size_is_refused(kind: Knowledge, extent: Extent) -> None:
    payload = encoded(kind, extent)
    wrong = [payload + bytes(more) for more in (1, 2, 8, 1000)]
    wrong += [payload[:cut] for cut in {0, 1, len(payload) // 2, len(payload) - 1} if 0 <= cut < len(payload)]
    for bad in wrong:
        with pytest.raises(ProtocolError, match=r"rows of .* must be .*, got"):
            kind.decode(memoryview(bad), extent)


@every_kind
@settings(deadline=None, max_examples=60)  # the first example loads kernels
@given(data=st.data())
def test_hostile_bytes_are_refused_or_decode_within_the_extent(kind: Knowledge, data: st.DataObject) -> None:
    payload = bytearray(encoded(kind, EXTENT))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    with contextlib.suppress(ProtocolError):
        arrays = kind.decode(memoryview(bytes(payload)), EXTENT)
        expected = arrays_of(kind, EXTENT)
        for name, array in arrays.items():
            assert array.shape == expected[name].shape
            assert np.isfinite(array).all()
            if name in ("ids", "sequence", "labels"):
                assert ((array >= 0) & (array < EXTENT.vocabulary)).all()


@every_kind
@settings(deadline=None, max_examples=60)
@given(payload=st.binary(max_size=500))
def test_random_bytes(kind: Knowledge, payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        kind.decode(memoryview(payload), EXTENT)


@every_kind
@pytest.mark.parametrize("what", ["right", "too long", "ones", "zeros"])
def test_decoding_allocates_no_more_than_it_says(kind: Knowledge, what: str) -> None:
    extent = Extent(rows=500, samples=100, vocabulary=2000, width=64, longest=50)
    good = encoded(kind, extent)
    payload = {"right": good, "too long": bytes(40 << 20), "ones": b"\xff" * len(good), "zeros": bytes(len(good))}[what]
    kind.decode(memoryview(good), extent)  # loads kernels
    tracemalloc.start()
    with contextlib.suppress(ProtocolError):
        kind.decode(memoryview(payload), extent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= kind.memory(extent)


@every_kind
def test_arrays_that_do_not_cover_the_extent_are_refused(kind: Knowledge) -> None:
    arrays = arrays_of(kind, EXTENT)
    for name in kind.names():
        with pytest.raises(NebulaError, match=r"is made of .*, got"):
            kind.encode({other: array for other, array in arrays.items() if other != name}, EXTENT)
        with pytest.raises(NebulaError, match=rf"'{name}' of .* must have the shape"):
            kind.encode(arrays | {name: arrays[name][1:]}, EXTENT)


@every_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_named(kind: Knowledge, bad: float) -> None:
    arrays = arrays_of(kind, EXTENT)
    for name in [name for name, array in arrays.items() if array.dtype == np.float32]:
        damaged = arrays[name].copy()
        damaged[3, ...] = bad
        with pytest.raises(NebulaError, match=rf"'{name}' of .* must be finite numbers, got .* in row 3"):
            kind.encode(arrays | {name: damaged}, EXTENT)


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_found_by_its_spec(spec: str) -> None:
    kind = named(spec)
    assert kind.spec == spec
    assert named(kind.spec).spec == kind.spec
    assert kind.grammar.startswith(spec.partition(":")[0])


def test_several_at_once() -> None:
    kinds = knowledge_from_spec("logits:top32,int8,tau=1 + hidden:3/6,int8+labels")
    assert spec_of(kinds) == "logits:top32+hidden:3/6+labels"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "must be one or more of logits:topK"),
        ("Logits:top3", "did you mean 'logits'?"),
        ("logits", "K must be a whole number from 1 to 4096"),
        ("logits:top0", "K must be a whole number from 1 to 4096"),
        ("logits:top32,int4", "an option must be int8, fp16 or tau=T, got 'int4'"),
        ("logits:top32,tau=0", "T must be above 0"),
        ("logits:top32,tau=nan", "T must be above 0"),
        ("hidden", "layers must be up to 32 ascending whole numbers"),
        ("hidden:6/3", "layers must be up to 32 ascending whole numbers"),
        ("hidden:3,lowrank:0", "lowrank:R with R at least 1"),
        ("hidden:3,fp32", "an option must be int8, fp16 or lowrank:R"),
        ("attention-relations:0", "L must be one layer, from 1"),
        ("attention-relations:1/2", "L must be one layer, from 1"),
        ("attention-relations:1,lowrank:3", "may be followed by one of fp16, int8"),
        ("labels:3", "labels takes no options"),
        ("sequence:", "sequence takes no options"),
        ("hidden:3+hidden:3/6", "everything once, got hidden.3 twice"),
        ("logits:top3+logits:top4", "everything once, got ids, log_probabilities, log_tail twice"),
    ],
)
def test_other_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        knowledge_from_spec(spec)
