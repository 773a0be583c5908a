"""Selections: what travels, once each, in an order and with a fingerprint that all clusters share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.selection import Selection, frozen_digest, running_statistics, select
from paddlenlp_nebula.tensors import gradient, read_into, set_gradient, write

from .models import Tied

TRAINABLE = ["first.weight", "first.bias", "second.bias"]
FROZEN = ["frozen.weight", "frozen.bias"]


@pytest.mark.parametrize(("which", "names"), [("trainable", TRAINABLE), ("all", TRAINABLE + FROZEN)])
def test_tied_weights_count_once_and_frozen_ones_only_if_asked_for(which: str, names: list[str]) -> None:
    selection = select(Tied(), which)
    assert selection.names == names
    assert len(selection) == len(names)
    assert selection.offsets[:4] == [0, 16, 20, 24]
    assert selection.numel == selection.offsets[-1] == sum(p.size for p in selection.parameters)


@pytest.mark.parametrize("which", ["trainable", "all"])
def test_nothing_to_send_is_refused(which: str) -> None:
    model = Tied() if which == "trainable" else paddle.nn.ReLU()
    for parameter in model.parameters():
        parameter.stop_gradient = True
    with pytest.raises(
        ConfigurationError, match=f"sync_parameters='{which}' selects no parameter of {type(model).__name__}"
    ):
        select(model, which)


def test_what_float32_cannot_hold_is_refused() -> None:
    model = Tied()
    model.to(dtype="float64")
    with pytest.raises(
        ConfigurationError, match=r"must be float32, bfloat16 or float16, got first\.weight \(float64\)"
    ):
        select(model, "trainable")


def test_adapters_need_an_adapter() -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs a model with an adapter .* got Tied: use sync_parameters='trainable'"
    ):
        select(Tied(), "adapters")


def test_the_fingerprint_depends_on_the_form_alone() -> None:
    prints = {select(Tied(seed), "trainable").fingerprint() for seed in range(3)}
    assert len(prints) == 1
    assert next(iter(prints)).startswith("3 parameters, 24 elements, ")


CHANGES: list[Callable[[list[tuple[str, Any]]], list[tuple[str, Any]]]] = [
    lambda named: named[::-1],
    lambda named: named[:-1],
    lambda named: [("other", named[0][1]), *named[1:]],
    lambda named: [(named[0][0], named[0][1].reshape([2, 8])), *named[1:]],
    lambda named: [(named[0][0], named[0][1].astype("bfloat16")), *named[1:]],
    lambda named: [(named[0][0], named[1][1]), (named[1][0], named[0][1]), *named[2:]],
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_difference_changes_the_fingerprint(
    change: Callable[[list[tuple[str, Any]]], list[tuple[str, Any]]],
) -> None:
    named = [(name, p) for name, p in Tied().named_parameters() if not p.stop_gradient]
    assert Selection(change(named)).fingerprint() != Selection(named).fingerprint()


def frozen(model: Any, which: str = "trainable") -> str:
    return frozen_digest(model, select(model, which).parameters)


def test_the_frozen_digest_covers_what_does_not_travel() -> None:
    model = Tied()
    digest = frozen(model)
    assert frozen(Tied()) == digest
    write(model.first.weight, np.zeros(16, dtype=np.float32))
    assert frozen(model) == digest
    assert frozen(model, "all") != digest
    for name in ("frozen.weight", "frozen.bias", "scale"):
        changed = Tied()
        tensor = changed.state_dict()[name]
        tensor.set_value(tensor + 1e-6)
        assert frozen(changed) != digest, name


def test_running_statistics_are_each_clusters_own() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3))
    assert list(running_statistics(model).values()) == ["1._mean", "1._variance"]
    selection = select(model, "all")
    assert selection.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    digests = {
        frozen_digest(model, selection.parameters),
        frozen_digest(model, selection.parameters, without=running_statistics(model)),
    }
    model(paddle.ones([4, 2]))
    digests |= {
        frozen_digest(model, selection.parameters),
        frozen_digest(model, selection.parameters, without=running_statistics(model)),
    }
    assert len(digests) == 3


def test_the_frozen_digest_reads_half_precision() -> None:
    model = Tied()
    model.frozen.to(dtype="bfloat16")
    assert frozen(model) != frozen(Tied())


# tensors.py


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reading_and_writing_parts(dtype: str) -> None:
    values = np.arange(12, dtype=np.float32)
    tensor = paddle.zeros([3, 4], dtype=dtype)
    write(tensor, values)
    assert tensor.shape == [3, 4]
    assert str(tensor.dtype).endswith(dtype)
    for start, stop in [(0, 12), (3, 7), (11, 12), (5, 5)]:
        out = np.full(stop - start, -1, dtype=np.float32)
        read_into(tensor, start, stop, out)
        np.testing.assert_array_equal(out, values[start:stop])


def test_reading_follows_the_shape_and_not_the_memory() -> None:
    tensor = paddle.to_tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).t()
    out = np.empty(6, dtype=np.float32)
    read_into(tensor, 0, 6, out)
    np.testing.assert_array_equal(out, [0, 3, 1, 4, 2, 5])


def test_gradients_are_replaced_created_and_taken_away() -> None:
    parameter = paddle.nn.Linear(2, 2).weight
    assert gradient(parameter) is None
    set_gradient(parameter, np.ones(4, dtype=np.float32))
    created = gradient(parameter)
    np.testing.assert_array_equal(created.numpy(), np.ones((2, 2)))
    set_gradient(parameter, np.full(4, 2, dtype=np.float32))
    assert gradient(parameter) is created or np.all(gradient(parameter).numpy() == 2)
    set_gradient(parameter, None)
    assert gradient(parameter) is parameter.grad is None


def test_the_master_gradient_is_the_one_that_counts() -> None:
    parameter = paddle.nn.Linear(2, 2).astype("bfloat16").weight
    parameter.main_grad = None
    set_gradient(parameter, np.full(4, 1.001, dtype=np.float32))
    assert str(parameter.main_grad.dtype).endswith("float32")
    assert parameter.grad is None
    np.testing.assert_array_equal(gradient(parameter).numpy(), np.full((2, 2), 1.001, dtype=np.float32))
    set_gradient(parameter, None)
    assert parameter.main_grad is None
