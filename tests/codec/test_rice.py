"""Golomb-Rice coded entries: whatever set comes back, within the bound; nothing else is accepted."""

from __future__ import annotations

from math import comb, log2

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.codec.rice import Entries, Grid, pack, unpack


def entries_of(positions: list[int], grid: Grid) -> Entries:
    array = np.array(sorted(positions), dtype=np.int64)
    return Entries(array, np.bincount(array // grid.chunk, minlength=grid.chunks).astype(np.int32))


def random_codes(count: int, width: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << width, count, dtype=np.uint32)


def most_of(grid: Grid) -> list[range]:
    """The first ceil(K n / CHUNK) positions of each chunk of n elements."""
    starts = range(0, grid.numel, grid.chunk)
    return [range(start, start - (-grid.kept * min(grid.chunk, grid.numel - start) // grid.chunk)) for start in starts]


def check(positions: list[int], grid: Grid, width: int) -> int:
    """There and back; the size in bytes."""
    entries, codes = entries_of(positions, grid), random_codes(len(positions), width)
    stream = pack(entries, codes, width, grid)
    assert stream.nbytes <= -(-grid.most_bits(width) // 8)
    found, found_codes = unpack(stream, width, grid)
    np.testing.assert_array_equal(found.positions, entries.positions)
    np.testing.assert_array_equal(found.counts, entries.counts)
    np.testing.assert_array_equal(found_codes, codes)
    return stream.nbytes


def by_hand(positions: list[int], grid: Grid, codes: npt.NDArray[np.uint32], width: int) -> bytes:
    """The stream as the module describes it, as text of zeros and ones."""
    text, rest = "", iter(codes.tolist())
    for allowed in most_of(grid):
        stop = min(allowed.start + grid.chunk, grid.numel)
        own = [position for position in sorted(positions) if allowed.start <= position < stop]
        if len(own) == len(allowed):
            text += "0"
        else:
            text += "1" + lowest_first(len(own), (len(allowed) - 1).bit_length())
        after = allowed.start
        for position in own:
            high, low = divmod(position - after, 1 << grid.parameter)
            text += "0" * high + "1" + lowest_first(low, grid.parameter) + lowest_first(next(rest), width)
            after = position + 1
    return in_bytes(text)


def in_bytes(text: str) -> bytes:
    """Zeros and ones, eight to a byte from its least significant bit, the last filled with zeros."""
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


def lowest_first(number: int, bits: int) -> str:
    return f"{number:0{bits}b}"[::-1] if bits else ""


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    chunk = draw(st.integers(1, 300) | st.sampled_from([4096, 65536]))
    return Grid(draw(st.integers(1, 1000) | st.integers(65000, 70000)), draw(st.integers(1, chunk)), chunk)


@settings(deadline=None)
@given(grid=grids(), width=st.sampled_from([1, 2, 4, 16, 32]), data=st.data())
def test_any_set_comes_back(grid: Grid, width: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    where = data.draw(st.sampled_from(["random", "first", "last"]))
    positions: list[int] = []
    for allowed in most_of(grid):
        numel = min(grid.chunk, grid.numel - allowed.start)
        count = data.draw(st.sampled_from([len(allowed), len(allowed) - 1, 0])) if len(positions) < 1000 else 0
        own = {"random": generator.permutation(numel), "first": np.arange(numel), "last": np.arange(numel)[::-1]}
        positions += (allowed.start + own[where][:count]).tolist()
    check(positions, grid, width)


@settings(deadline=None)
@given(positions=st.sets(st.integers(0, 99), max_size=12), parameters=st.sampled_from([(3, 20), (12, 100), (20, 20)]))
def test_the_stream_is_as_described(positions: set[int], parameters: tuple[int, int]) -> None:
    grid = Grid(97, *parameters)
    counted = [
        position
        for allowed in most_of(grid)
        for position in sorted(positions & set(range(allowed.start, min(allowed.start + grid.chunk, 97))))[
            : len(allowed)
        ]
    ]
    codes = random_codes(len(counted), 4)
    assert bytes(pack(entries_of(counted, grid), codes, 4, grid)) == by_hand(counted, grid, codes, 4)


@pytest.mark.parametrize("numel", [1, 63, 4096, 10_000])
@pytest.mark.parametrize("width", [1, 2, 32])
def test_the_worst_case_is_the_bound(numel: int, width: int) -> None:
    grid = Grid(numel, 64, 4096)
    last = [min(r.start + 4096, numel) - 1 - i for r in most_of(grid) for i in range(len(r))]
    assert check(last, grid, width) == -(-grid.most_bits(width) // 8)


def test_no_position_takes_more_than_eight_bits() -> None:
    assert Grid(4096, 64, 4096).most_bits(0) == 1 + 64 * (1 + 5) + (4096 - 64) // 32


@pytest.mark.parametrize(("kept", "chunk"), [(64, 4096), (1, 64), (4, 64), (1024, 4096), (2000, 4096), (40, 65536)])
def test_random_positions_take_what_is_expected(kept: int, chunk: int) -> None:
    numel = 40 * max(chunk, 4096) + 17
    grid, generator = Grid(numel, kept, chunk), np.random.default_rng(0)
    positions = [
        allowed.start + int(i)
        for allowed in most_of(grid)
        for i in generator.choice(min(chunk, numel - allowed.start), len(allowed), replace=False)
    ]
    size = check(positions, grid, 2)
    assert 8 * size == pytest.approx(grid.expected_bits(2), rel=0.01)
    entropy = log2(comb(chunk, kept)) / kept
    assert grid.expected_bits(0) / len(positions) <= 1.06 * entropy + 2 / kept


def test_the_parameter_is_the_best() -> None:
    for kept in [1, 3, 20, 64, 300, 1300, 2100, 4096]:
        grid = Grid(4096, kept, 4096)

        def bits(parameter: int, kept: int = kept) -> float:
            chosen = type("Fixed", (Grid,), {"parameter": parameter})
            return float(chosen(4096, kept, 4096).expected_bits(2))

        assert grid.expected_bits(2) <= 1.02 * min(bits(parameter) for parameter in range(13))


def stream_of(grid: Grid, width: int = 2) -> bytes:
    positions = [position for allowed in most_of(grid) for position in allowed]
    return bytes(pack(entries_of(positions, grid), random_codes(len(positions), width), width, grid))


@pytest.mark.parametrize("grid", [Grid(100, 7, 30), Grid(4096, 64, 4096), Grid(65536, 1, 65536), Grid(3, 3, 3)])
def test_what_is_cut_or_goes_on_is_refused(grid: Grid) -> None:
    stream = stream_of(grid)
    for cut in range(len(stream)):
        with pytest.raises(ValueError, match="ends early or points outside"):
            unpack(memoryview(stream[:cut]), 2, grid)
    for more in (1, 7, 8, 9, 1000):
        with pytest.raises(ValueError, match=f"{more} bytes after its last code"):
            unpack(memoryview(stream + bytes(more)), 2, grid)


def test_ones_after_the_last_code_are_refused() -> None:
    grid = Grid(3, 3, 3)  # 1 + 3 * (1 + 2) = 10 bits
    stream = bytearray(stream_of(grid))
    stream[-1] |= 0x80
    with pytest.raises(ValueError, match="after its last code"):
        unpack(memoryview(stream), 2, grid)


def test_a_number_of_entries_that_is_cut_off_is_refused() -> None:
    grid = Grid(4096, 4000, 4096)
    assert bytes(pack(entries_of([], grid), random_codes(0, 2), 2, grid)) == b"\x01\x00"  # 1 + 12 bits
    with pytest.raises(ValueError, match="ends early"):
        unpack(memoryview(b"\x01"), 2, grid)


@pytest.mark.parametrize(
    "text",
    [
        "0" + "1000",  # a second and a third entry are missing
        "1" + "11" + "1000" * 3,  # "three" is said by a zero
        "0" + "0" * 12 + "1" + "0" * 20,  # the first position is 24
        "0" + "1000" * 2 + "00000" + "1000",  # the third is 12
        "1" + "10" + "00001" + "1" + "00",  # the only one is 9
        "0" * 500,
        "0" * 500 + "1" * 500,
        "0" + "1" * 12 + "1",  # nine elements have no second chunk
    ],
)
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ends early|after its last"):
        unpack(memoryview(in_bytes(text)), 2, Grid(9, 3, 9))


def test_the_last_position_is_accepted() -> None:
    assert unpack(memoryview(in_bytes("1" + "10" + "00001" + "0" + "00")), 2, Grid(9, 3, 9))[0].positions.tolist() == [
        8
    ]


@settings(deadline=None)
@given(stream=st.binary(max_size=400), grid=grids(), width=st.sampled_from([1, 2, 4, 16, 32]))
def test_random_bytes_give_entries_within_the_grid_or_an_error(stream: bytes, grid: Grid, width: int) -> None:
    try:
        entries, codes = unpack(memoryview(stream), width, grid)
    except ValueError:
        return
    assert len(entries.positions) == len(codes) == entries.counts.sum()
    assert (np.diff(entries.positions) > 0).all()
    assert (entries.positions < grid.numel).all()
    np.testing.assert_array_equal(entries.positions // grid.chunk, np.repeat(np.arange(grid.chunks), entries.counts))
    assert (codes < 1 << width).all()
    assert bytes(pack(entries, codes, width, grid)) == stream
