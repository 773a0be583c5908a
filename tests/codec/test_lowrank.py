"""Low rank: as near as the best approximation of that rank, decoded by numpy's plain sums, nothing lost in a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_nebula.codec.codec import Float32Vector, Layout, State, Turn
from paddlenlp_nebula.codec.lowrank import LowRank
from paddlenlp_nebula.errors import ConfigurationError, ProtocolError
from tests.codec.table import TURN, decoded, named, normal

ROWS, COLUMNS = 60, 40
MATRIX = Layout(((ROWS, COLUMNS),))


def with_spectrum(values: np.ndarray, seed: int = 0) -> Float32Vector:
    """A matrix (ROWS, COLUMNS) with these singular values, flat."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((ROWS, len(values))))[0]
    right = np.linalg.qr(rng.standard_normal((COLUMNS, len(values))))[0]
    return ((left * values) @ right.T).astype(np.float32).ravel()


def rounds(codec: LowRank, vector: Float32Vector, state: State, count: int) -> list[float]:
    """Errors, as norms, of encoding the same vector again and again."""
    error, norms = np.empty_like(vector), []
    for number in range(1, count + 1):
        codec.encode(vector, MATRIX, state, Turn(number, 0, 0), error)
        norms.append(float(np.linalg.norm(error.astype(np.float64))))
    return norms


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("factors", ["fp32", "bf16"])
def test_a_few_rounds_come_near_the_best_rank_r_error(rank: int, factors: str) -> None:
    spectrum = 0.7 ** np.arange(COLUMNS)
    vector, codec = with_spectrum(spectrum), LowRank(rank, factors)
    values = np.linalg.svd(vector.reshape(ROWS, COLUMNS).astype(np.float64), compute_uv=False)
    best = np.sqrt((values[rank:] ** 2).sum())
    errors = rounds(codec, vector, codec.init(MATRIX), 12)
    assert best * (1 - 1e-5) <= errors[-1] <= best * 1.02
    assert errors[0] > errors[-1] * 1.02  # the warm start is what helps
    assert errors[0] <= np.linalg.norm(vector)


def test_one_round_is_algorithm_1_of_the_paper() -> None:
    """P = orthogonalise(M Q), Q' = M^T P, M ~ P Q'^T, in float64 by Gram-Schmidt as the authors do it."""
    vector, codec = normal(MATRIX.numel), LowRank(3)
    state = codec.init(MATRIX)
    matrix = vector.reshape(ROWS, COLUMNS).astype(np.float64)
    p = matrix @ state["q0"]
    for i in range(3):
        p[:, i] /= np.linalg.norm(p[:, i])
        p[:, i + 1 :] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    q = matrix.T @ p
    payload = bytes(codec.encode(vector, MATRIX, state, TURN))
    np.testing.assert_allclose(decoded(codec, payload, MATRIX).reshape(ROWS, COLUMNS), p @ q.T, atol=2e-5)
    signs = np.sign((state["q0"] * q).sum(axis=0))
    np.testing.assert_allclose(state["q0"], signs * q / np.linalg.norm(q, axis=0), atol=1e-5)


@pytest.mark.parametrize("factors", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(300, 4100), (5, 2049), (2049, 5), (64, 3, 7)])
def test_decoding_is_products_and_sums_in_order(shape: tuple[int, ...], factors: str) -> None:
    """Fused or reordered operations would change the last bit of many of these elements."""
    layout, codec = Layout((shape,)), LowRank(4, factors)
    payload = bytes(codec.encode(normal(layout.numel), layout, codec.init(layout), TURN))
    rows, columns = shape[0], layout.numel // shape[0]
    if factors == "fp32":
        numbers = np.frombuffer(payload, dtype="<f4")
    else:
        numbers = (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    rank = len(numbers) // (rows + columns)
    p, q = numbers[: rows * rank].reshape(rows, rank), numbers[rows * rank :].reshape(rank, columns)
    expected = p[:, :1] * q[:1]
    for k in range(1, rank):
        expected = expected + p[:, k : k + 1] * q[k : k + 1]
    np.testing.assert_array_equal(decoded(codec, payload, layout).view(np.uint32), expected.ravel().view(np.uint32))


def test_what_the_payload_holds() -> None:
    layout = Layout(((100, 50), (7,), (), (3, 4), (20, 5, 5)))
    for codec, itemsize in ((LowRank(2), 4), (LowRank(2, "bf16"), 2)):
        small = min(4 * 12, itemsize * 7 * 2)  # (3, 4)
        wanted = itemsize * 2 * 150 + 4 * 7 + 4 + small + itemsize * 2 * 45
        assert codec.estimate(layout) == codec.bound(layout) == wanted
        state = codec.init(layout)
        assert {name: array.shape for name, array in state.items() if name != "q3"} == {"q0": (50, 2), "q4": (25, 2)}
        assert all(array.dtype == np.float32 for array in state.values())


def test_vectors_and_small_matrices_travel_as_they_are() -> None:
    layout, codec = Layout(((9,), (2, 2), (100, 50), ())), LowRank(2)
    vector, error = normal(layout.numel), np.empty(layout.numel, dtype=np.float32)
    codec.encode(vector, layout, codec.init(layout), TURN, error)
    np.testing.assert_array_equal(error[:13], 0)
    assert error[-1] == 0
    assert np.abs(error[13:-1]).max() > 0.1


@pytest.mark.parametrize(
    ("shapes", "compresses"),
    [(((7,), (4000,), ()), False), (((2, 2), (7,)), False), (((7,), (16, 16)), True), (((4, 1000),), False)],
)
def test_whether_it_compresses_anything(shapes: tuple[tuple[int, ...], ...], compresses: bool) -> None:
    assert LowRank(4).compresses(Layout(shapes)) is compresses


@pytest.mark.parametrize("factors", ["fp32", "bf16"])
def test_dependent_columns(factors: str) -> None:
    """A matrix of rank 1 in a codec of rank 4: exact but for rounding, and ready for a fuller one."""
    vector, codec = with_spectrum(np.array([3.0])), LowRank(4, factors)
    state = codec.init(MATRIX)
    assert rounds(codec, vector, state, 5)[-1] <= (1e-5 if factors == "fp32" else 0.02)
    assert all(np.isfinite(array).all() for array in state.values())
    full = with_spectrum(np.array([4.0, 3.0, 2.0, 1.0]), seed=1)
    assert rounds(codec, full, state, 8)[-1] <= (1e-4 if factors == "fp32" else 0.05)


def test_zeros_do_not_end_the_search() -> None:
    """After rounds of zeros, rows that were always zero included, it still finds what comes."""
    codec = LowRank(2)
    state = codec.init(MATRIX)
    start = state["q0"].copy()
    assert rounds(codec, np.zeros(MATRIX.numel, dtype=np.float32), state, 3) == [0.0] * 3
    np.testing.assert_array_equal(state["q0"], start)
    matrix = np.zeros((ROWS, COLUMNS), dtype=np.float32)
    matrix[10:20] = with_spectrum(np.array([2.0, 1.0])).reshape(ROWS, COLUMNS)[10:20]
    assert rounds(codec, matrix.ravel(), state, 4)[-1] <= 1e-5


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e20, 1e37])
def test_any_magnitude(scale: float) -> None:
    vector, codec = (normal(MATRIX.numel) * np.float32(scale)).astype(np.float32), LowRank(4)
    errors = rounds(codec, vector / np.float32(scale), codec.init(MATRIX), 4)
    scaled = [error / scale for error in rounds(codec, vector, codec.init(MATRIX), 4)]
    np.testing.assert_allclose(scaled, errors, rtol=1e-3)


def test_what_no_factor_can_hold_is_refused() -> None:
    codec, vector = LowRank(1), np.full(MATRIX.numel, 3e38, dtype=np.float32)
    with pytest.raises(OverflowError, match=r"a matrix with the largest magnitude 3e\+38 .* outside float32"):
        codec.encode(vector, MATRIX, codec.init(MATRIX), TURN)


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    codec, layout = LowRank(2), Layout(((30, 20), (5,), (16, 3, 3)))
    state, payloads = codec.init(layout), []
    for number in range(1, 6):
        if number == 3:
            saved = {name: array.tobytes() for name, array in state.items()}
        payloads.append(bytes(codec.encode(normal(layout.numel, number), layout, state, Turn(number, 0, 0))))
    resumed = LowRank(2).init(layout)
    for name, array in resumed.items():
        array[:] = np.frombuffer(saved[name], dtype=np.float32).reshape(array.shape)
    for number in range(3, 6):
        again = codec.encode(normal(layout.numel, number), layout, resumed, Turn(number, 0, 0))
        assert bytes(again) == payloads[number - 1]


def test_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="2400 elements as lowrank:2,bf16 must be 400 bytes, got 399"):
        decoded(LowRank(2, "bf16"), bytes(399), MATRIX)


def test_specs() -> None:
    assert [named(spec).spec for spec in ("lowrank:4", "lowrank:4,fp32", "lowrank:16,bf16")] == [
        "lowrank:4",
        "lowrank:4",
        "lowrank:16,bf16",
    ]
    assert named("lowrank:4").whole_tensors


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lowrank", "R must be a whole number from 1"),
        ("lowrank:0", "R must be a whole number from 1"),
        ("lowrank:-1", "R must be a whole number from 1"),
        ("lowrank:2.5", "R must be a whole number from 1"),
        ("lowrank:4,fp16", "after R only one of fp32, bf16 may follow"),
        ("lowrank:4,bf16,bf16", "after R only one of fp32, bf16 may follow"),
    ],
)
def test_other_options_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"sync_codec must be lowrank:R\[.*, got '{spec}': {sentence}"):
        named(spec)
