"""Bytes that nobody can tell from random ones without the key: AES-256 in counter mode (NIST SP 800-38A)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["KEY_BYTES", "keystream"]

KEY_BYTES = 32


def keystream(key: bytes, length: int) -> npt.NDArray[np.uint8]:
    """The first ``length`` bytes of the stream of a key, which must be used for nothing else.

    Args:
        key: `KEY_BYTES` bytes.
        length: up to 2^68: the counter begins at 0 and is 128 bits long.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(length)), dtype=np.uint8)
