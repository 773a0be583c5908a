"""Masks that two members have in common and nobody else: what one adds, the other subtracts.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (arXiv 1611.04482),
section 4.0.1, "masking with one-time pads", the keys agreed on by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.gather import all_gather_notes
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.privacy.fixed_point import Ring
from paddlenlp_nebula.privacy.keystream import KEY_BYTES, keystream

__all__ = ["Masks", "read_key"]

_LABEL = b"paddlenlp-nebula: secure aggregation"
_FIELD = "mask_key"


class Masks:
    """This member's masks as long as the member list stays as it is.

    Args:
        cluster: this member.
        keys: member -> its public key, in the members' order, this one included.
        private: this member's private key.
        epoch: number of the member list.

    Attributes:
        era: the epoch and the members: a cluster that comes back may have known another list by the same number.

    Raises:
        PeerLost: what a member gave is no public key.
    """

    def __init__(self, cluster: str, keys: Mapping[str, bytes], private: X25519PrivateKey, epoch: int) -> None:
        self.era = epoch, tuple(keys)
        members = list(keys)
        self._latest = (0, -1)
        # Everything that was agreed on, so that members who have seen different keys share no mask.
        transcript = hashlib.sha256()
        for member, key in keys.items():
            transcript.update(struct.pack("!H", len(member.encode())) + member.encode() + key)
        self._salt = transcript.digest()
        self._pairs: list[tuple[bool, bytes, bytes]] = []  # whether to add, who, the common secret
        for peer, key in keys.items():
            if peer == cluster:
                continue
            try:
                secret = private.exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError as error:
                raise PeerLost(peer, f"its key for masks must be a point of X25519, got {key.hex()}") from error
            first, second = sorted((cluster, peer), key=members.index)
            self._pairs.append((cluster == first, f"{first},{second}".encode(), secret))

    @classmethod
    def agree(cls, link: Link, number: int) -> Masks:
        """Give all members a fresh public key, and get theirs; a note of exchange ``number`` carries it.

        Raises:
            PeerLost: a member is lost, or what it gave is no public key.
        """
        private = X25519PrivateKey.generate()
        note = {_FIELD: private.public_key().public_bytes_raw().hex()}
        notes = all_gather_notes(link, note, round=number)
        keys = {member: read_key(theirs, member) for member, theirs in notes.items()}
        return cls(link.cluster, keys, private, link.epoch)

    def add(self, vector: Ring, number: int, part: int) -> None:
        """Mask a vector, in place: over all members, the masks of a round and bucket sum to 0.

        Args:
            vector: shape (numel,), of any unsigned dtype.
            number: exchange number.
            part: the bucket's number.

        Raises:
            NebulaError: such a mask has been used already.
        """
        if (number, part) <= self._latest:
            raise NebulaError(
                f"a mask must be used once, and in order, got round {number}, part {part} in epoch {self.era[0]} after "
                f"{self._latest}: this is a defect, please report it"
            )
        self._latest = number, part
        turn = struct.pack("!IQI", self.era[0], number, part)
        for adds, pair, secret in self._pairs:
            derive = HKDF(SHA256(), KEY_BYTES, self._salt, b"\0".join((_LABEL, pair, turn)))
            mask = keystream(derive.derive(secret), vector.nbytes).view(vector.dtype)
            (np.add if adds else np.subtract)(vector, mask, out=vector)


def read_key(note: Mapping[str, Any], member: str) -> bytes:
    """The public key in a member's note, of any length.

    Raises:
        PeerLost: there is none.
    """
    try:
        return bytes.fromhex(note[_FIELD])
    except (KeyError, TypeError, ValueError) as error:
        raise PeerLost(member, f"its key for masks must be hexadecimal, got {note!r:.80}") from error
