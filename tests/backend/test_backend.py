"""One contract over both backends, the device being the CPU: the same bits, whatever holds them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.backend.backend import Backend, Vector
from paddlenlp_nebula.backend.choose import choose_backend
from paddlenlp_nebula.backend.device import DeviceBackend, DeviceFlat
from paddlenlp_nebula.backend.host import HOST, HostBackend
from paddlenlp_nebula.buckets import cut
from paddlenlp_nebula.codec.codec import Codec, Float32Vector, Layout, Turn
from paddlenlp_nebula.codec.feedback import ErrorFeedback
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.selection import Selection, select
from paddlenlp_nebula.tensors import gradient, set_gradient, write
from tests.codec.table import FED_BACK, SPECS, named, normal
from tests.models import Tied

DEVICE = DeviceBackend(paddle.zeros([1]).place)
BACKENDS = [HOST, DEVICE]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, 1.0, -1.0, 1 / 3, 16777217.0]


def held(backend: Backend, numbers: Any) -> Vector:
    """A vector of a backend."""
    array = np.asarray(numbers, dtype=np.float32)
    flat = backend.flat([len(array)])
    backend.load(flat, array)
    return flat[: len(array)]


def numbers(seed: int) -> Float32Vector:
    """Ordinary ones, and the ends of float32 among them."""
    rng = np.random.default_rng(seed)
    return rng.permutation(np.concatenate([normal(200, seed), np.float32(SPECIAL)])).astype(np.float32)


def assert_bits(backend: Backend, actual: Any, wanted: Any) -> None:
    found = backend.to_host(actual)
    assert (found.dtype, found.shape) == (np.float32, np.shape(wanted))
    assert found.tobytes() == np.asarray(wanted, dtype=np.float32).tobytes()


# Vectors


@every_backend
def test_operations(backend: Backend) -> None:
    a, b, factor = numbers(0) / 2, numbers(1) / 2, np.float32(0.7)
    for act, wanted in [
        (lambda out, vector: backend.assign(out, vector), b),
        (lambda out, vector: backend.add(out, vector), a + b),
        (lambda out, vector: backend.add(out, vector, factor), a + factor * b),
        (lambda out, vector: backend.subtract(out, vector), a - b),
        (lambda out, vector: backend.scale(out, factor), a * factor),
        (lambda out, vector: backend.fill(out, math.inf), np.full_like(a, np.inf)),
        (lambda out, vector: backend.fill(out, -0.0), np.full_like(a, -0.0)),
    ]:
        out, vector = held(backend, a), held(backend, b)
        act(out, vector)
        assert_bits(backend, out, wanted)
        assert_bits(backend, vector, b)
    assert_bits(backend, held(backend, a) + held(backend, b), a + b)


@every_backend
def test_a_copy_is_fresh(backend: Backend) -> None:
    vector = held(backend, [1, 2])
    copy = backend.copy(vector)
    backend.fill(copy, 5.0)
    assert_bits(backend, vector, [1, 2])


@every_backend
@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([0.0, -1.0], True),
        ([3.4e38] * 9, True),  # their float32 sum is not
        ([1e-45, -0.0], True),
        ([math.inf, -math.inf], False),
        ([1.0, math.nan], False),
        ([-math.inf, 1.0], False),
    ],
)
def test_finite(backend: Backend, values: list[float], finite: bool) -> None:
    assert backend.finite(held(backend, values)) is finite


@every_backend
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_slices_of_a_flat(backend: Backend, sizes: list[int], data: st.DataObject) -> None:
    flat, total = backend.flat(sizes), sum(sizes)
    assert len(flat) == total
    assert_bits(backend, flat, np.zeros(total))
    backend.load(flat, np.arange(total, dtype=np.float32))
    ends = np.cumsum([0, *sizes])
    bucket = data.draw(st.integers(0, len(sizes) - 1))
    backend.scale(flat[ends[bucket] : ends[bucket + 1]], np.float32(-1))  # changes the flat
    wanted = np.arange(total, dtype=np.float32)
    wanted[ends[bucket] : ends[bucket + 1]] *= -1
    assert_bits(backend, flat, wanted)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert_bits(backend, flat[start:stop], wanted[start:stop])


def test_the_buckets_of_a_device_flat_are_tensors_of_their_own() -> None:
    flat = DeviceFlat([3, 4], paddle.CPUPlace())
    assert flat[3:7] is flat.tensors[1]
    assert flat[2:7] is not flat.tensors[1]


# Between vectors and parameters


def parameters() -> Selection:
    paddle.seed(0)
    named_ones = [("matrix", paddle.rand([3, 4])), ("turned", paddle.rand([5, 2]).T), ("scalar", paddle.rand([]))]
    named_ones += [(kind, paddle.rand([6]).astype(kind)) for kind in ("bfloat16", "float16")]
    return Selection(named_ones)


@every_backend
@pytest.mark.parametrize("bucket_numel", [1, 5, 12, 22, 100])
def test_gathering_reads_all_elements_as_float32(backend: Backend, bucket_numel: int) -> None:
    selection = parameters()
    wanted = np.concatenate([p.astype("float32").numpy().ravel() for p in selection.parameters])
    for bucket in cut(selection, bucket_numel):
        vector = backend.gather(bucket, selection.parameters.__getitem__)
        assert_bits(backend, vector, wanted[bucket.start : bucket.stop])


@every_backend
def test_what_is_absent_reads_as_zeros(backend: Backend) -> None:
    selection = Selection([("a", paddle.ones([2])), ("b", paddle.to_tensor([2.0, 3.0, 4.0]))])
    (bucket,) = cut(selection)
    vector = backend.gather(bucket, lambda index: None if index == 0 else selection.parameters[index])
    assert_bits(backend, vector, [0, 0, 2, 3, 4])


@every_backend
@pytest.mark.parametrize("sizes", [[4], [2, 2]])
def test_gathering_copies(backend: Backend, sizes: list[int]) -> None:
    selection = Selection([(str(i), paddle.create_parameter([size], "float32")) for i, size in enumerate(sizes)])
    for parameter in selection.parameters:
        parameter.set_value(paddle.ones(parameter.shape))
    vector = backend.gather(cut(selection)[0], selection.parameters.__getitem__)
    backend.fill(vector, -1.0)
    assert all(parameter.sum() == parameter.size for parameter in selection.parameters)


@every_backend
@pytest.mark.parametrize("position", [0, 5, 6, 23])
def test_digests_find_the_bucket_that_changed(backend: Backend, position: int) -> None:
    selection = select(Tied(), "trainable")
    buckets = cut(selection, 6)

    def digests() -> list[int]:
        return [backend.digest(backend.gather(bucket, selection.parameters.__getitem__)) for bucket in buckets]

    before = digests()
    index = next(i for i in range(3) if position < selection.offsets[i + 1])
    flat = selection.parameters[index].flatten().numpy().copy()
    flat[position - selection.offsets[index]] += 1e-6
    selection.parameters[index].set_value(flat.reshape(selection.parameters[index].shape))
    assert [number for number, (a, b) in enumerate(zip(before, digests(), strict=True)) if a != b] == [position // 6]


def test_digests_are_the_same_on_all_backends_and_do_not_depend_on_cuts() -> None:
    values = numbers(3)
    wholes = [backend.digest(held(backend, values)) for backend in BACKENDS]
    cuts = [backend.digest(held(backend, values[:7]), held(backend, values[7:])) for backend in BACKENDS]
    assert len({*wholes, *cuts}) == 1


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_writing_rounds_alike(backend: Backend, dtype: str) -> None:
    values = normal(12)
    parameter = paddle.create_parameter([3, 4], "float32").astype(dtype)
    vector = held(backend, values)
    write(parameter, vector)
    wanted = paddle.to_tensor(values.reshape(3, 4)).astype(dtype).astype("float32").numpy()
    np.testing.assert_array_equal(parameter.astype("float32").numpy(), wanted)
    backend.fill(vector, 0.0)
    np.testing.assert_array_equal(parameter.astype("float32").numpy(), wanted)


@every_backend
@pytest.mark.parametrize("present", [False, True])
def test_writing_gradients(backend: Backend, present: bool) -> None:
    parameter = paddle.create_parameter([3, 4], "float32")
    if present:
        parameter.grad = paddle.ones([3, 4])
    set_gradient(parameter, held(backend, normal(12)))
    np.testing.assert_array_equal(gradient(parameter).numpy(), normal(12).reshape(3, 4))
    (parameter.sum()).backward()  # accumulates
    np.testing.assert_array_equal(parameter.grad.numpy(), normal(12).reshape(3, 4) + np.float32(1))


@every_backend
def test_the_leaders_numbers_reach_all_processes(backend: Backend) -> None:
    ours, theirs = backend.flat([3, 2]), backend.flat([3, 2])
    backend.load(ours, np.arange(5, dtype=np.float32))
    sent: list[Any] = []
    leader = SimpleNamespace(
        broadcast=lambda vector: sent.append(vector), broadcast_tensor=lambda tensor, source: sent.append(tensor)
    )
    backend.broadcast(ours, leader)
    other = SimpleNamespace(
        broadcast=lambda vector: np.copyto(vector, sent.pop(0)),
        broadcast_tensor=lambda tensor, source: tensor.set_value(sent.pop(source)),
    )
    backend.broadcast(theirs, other)
    assert_bits(backend, theirs, np.arange(5))
    assert sent == []


# Codecs


LAYOUT = Layout(((90, 50), (700,)))
every_codec = pytest.mark.parametrize(
    "codec",
    [named(spec) for spec in SPECS] + [ErrorFeedback(named(spec), 0.95) for spec in FED_BACK],
    ids=[*SPECS, *(f"{spec} with feedback" for spec in FED_BACK)],
)


@every_codec
def test_payloads_mean_the_same_everywhere(codec: Codec) -> None:
    """Three rounds on each backend; every payload gives the same bits on both, and what is unsent comes back."""
    for sender in BACKENDS:
        encoder = sender.encoder(codec)
        state = sender.remember(codec.init(LAYOUT))
        for number in range(1, 4):
            payload = memoryview(
                bytes(encoder.encode(held(sender, normal(LAYOUT.numel, number)), LAYOUT, state, Turn(number, 2, 1)))
            )
            decoded, sums = [], []
            for backend in BACKENDS:
                twin, out = backend.encoder(codec), held(backend, normal(LAYOUT.numel, 9))
                decoded.append(backend.to_host(backend.decode(twin, payload, LAYOUT)).tobytes())
                twin.add(payload, LAYOUT, np.float32(0.3), out)
                sums.append(backend.to_host(out).tobytes())
            assert decoded[0] == decoded[1]
            assert sums[0] == sums[1]
        if (unsent := encoder.unsent(state)) is not None:
            before = sender.to_host(unsent).copy()
            encoder.take_back(payload, LAYOUT, state)
            wanted = before + np.frombuffer(decoded[0], np.float32)
            assert_bits(sender, encoder.unsent(state), wanted)


@every_codec
def test_a_state_moves_from_one_backend_to_the_other(codec: Codec) -> None:
    """And is there, in a checkpoint's form, what it is on the host."""
    state = HOST.remember(codec.init(LAYOUT))
    form = {name: (array.dtype, array.shape) for name, array in state.items()}
    for number, backend in enumerate([HOST, DEVICE, HOST, DEVICE], start=1):
        remembered = backend.remember({name: np.array(array) for name, array in state.items()})
        encoder = backend.encoder(codec)
        encoder.encode(held(backend, normal(LAYOUT.numel, number)), LAYOUT, remembered, Turn(number, 0, 0))
        state = backend.recall(remembered)
        assert {name: (array.dtype, array.shape) for name, array in state.items()} == form
        assert list(state) == list(form)


# The choice


def lying_at(place: str) -> list[Any]:
    return [SimpleNamespace(place=_Place(place))] * 2


class _Place:
    def __init__(self, name: str) -> None:
        self._name = name

    def is_cpu_place(self) -> bool:
        return self._name == "cpu"

    def __str__(self) -> str:
        return f"Place({self._name})"


PRODUCT = "sync_lora_merge='product' factors the products on the host"


@pytest.mark.parametrize(
    ("setting", "place", "kind"),
    [
        ("auto", "cpu", HostBackend),
        ("auto", "gpu:0", DeviceBackend),
        ("auto", "npu:1", DeviceBackend),
        ("host", "gpu:0", HostBackend),
        ("device", "xpu:0", DeviceBackend),
        ("device", "cpu", DeviceBackend),
    ],
)
def test_the_choice(setting: str, place: str, kind: type[Backend]) -> None:
    backend, reason = choose_backend(setting, lying_at(place))
    assert (type(backend), reason) == (kind, None)


@pytest.mark.parametrize(
    ("tensors", "only_host", "why"),
    [
        (lying_at("gpu:0"), PRODUCT, PRODUCT),
        ([*lying_at("gpu:0"), *lying_at("cpu")], None, r"lie in several places \(Place\(cpu\), Place\(gpu:0\)\)"),
    ],
)
def test_where_a_device_cannot_be_auto_says_why_and_device_is_refused(
    tensors: list[Any], only_host: str | None, why: str
) -> None:
    backend, reason = choose_backend("auto", tensors, only_host)
    assert backend is HOST
    assert reason is not None
    with pytest.raises(AssertionError, match=rf"sync_backend='auto' takes the host .*: .*{why}"):
        raise AssertionError(reason)
    with pytest.raises(
        ConfigurationError, match=f"sync_backend must be 'auto' or 'host' where .*{why}.*, got 'device'"
    ):
        choose_backend("device", tensors, only_host)
    assert choose_backend("host", tensors, only_host) == (HOST, None)


def test_on_a_cpu_nothing_is_said_of_what_a_device_could_not_do() -> None:
    assert choose_backend("auto", lying_at("cpu"), PRODUCT) == (HOST, None)
