"""A flat tensor as rows of blocks, and small codes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle

from paddlenlp_nebula.codec.device.transfer import Place, Tensor, number, to_device

__all__ = ["pack", "rows", "unpack"]


def rows(vector: Tensor, numel: int) -> Iterator[Tensor]:
    """The full blocks of ``numel`` elements, shape (blocks, numel), then the rest, shape (1, rest); if there are any."""
    full = vector.shape[0] // numel * numel
    if full:
        yield vector[:full].reshape([-1, numel])
    if full < vector.shape[0]:
        yield vector[full:].reshape([1, -1])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 2, 4 or 8 bits in bytes, as `Quantization` lays out a block.

    Args:
        codes: whole numbers below 2^bits, float32, shape (blocks, numel).

    Returns:
        The bytes as float32, shape (blocks, ceil(numel bits / 8)): byte j holds the codes j, w + j, 2 w + j, ...
        from its lowest bits up. All values are below 256, and exact.
    """
    blocks, numel = codes.shape
    places, count = _places(bits, codes.place), 8 // bits
    width = -(-numel // count)
    if missing := count * width - numel:
        codes = paddle.concat([codes, paddle.zeros([blocks, missing], "float32", device=codes.place)], axis=1)
    return (codes.reshape([blocks, count, width]) * places).sum(axis=1)


def unpack(octets: Tensor, bits: int, numel: int) -> Tensor:
    """What ``pack`` made bytes of: codes as float32, shape (blocks, numel).

    Args:
        octets: float32, shape (blocks, ceil(numel bits / 8)).
    """
    blocks, width = octets.shape
    place, base = octets.place, 2.0**bits
    # Powers of two and their inverses: all products are exact.
    shifted = (octets.reshape([blocks, 1, width]) * _places(-bits, place)).floor()
    codes = shifted - (shifted * number(1 / base, place)).floor() * number(base, place)
    return codes.reshape([blocks, 8 // bits * width])[:, :numel]


def _places(bits: int, place: Place) -> Tensor:
    """1, 2^bits, 4^bits, ... for the codes of a byte; with ``-bits`` their inverses; shape (1, 8 / |bits|, 1)."""
    exponents = np.arange(8 // abs(bits), dtype=np.float32) * bits
    return to_device(np.exp2(exponents).reshape(1, -1, 1), place)
