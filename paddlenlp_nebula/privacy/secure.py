"""Secure aggregation: every member learns the weighted mean of all updates, and no other member's update.

Each sends its weighted update in fixed point plus masks that cancel in the sum over all members. Unlike in Bonawitz et
al. 2017 (arXiv 1611.04482) nobody keeps shares of another member's keys: when one is lost, its masks do not cancel, the
attempt is void, and the others begin the round again with other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paddlenlp_nebula.buckets import Bucket
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import NebulaError, PeerLost
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.link.gather import all_gather
from paddlenlp_nebula.link.link import Link
from paddlenlp_nebula.privacy.fixed_point import FixedPoint, Ring
from paddlenlp_nebula.privacy.masks import Masks

__all__ = ["FEWEST", "SecureAggregation"]

FEWEST = 3
"""Members without which there is nothing to hide: of two, each computes the other's update from the sum."""


class SecureAggregation:
    """The members' weighted mean, on a cluster's leader.

    Args:
        fixed_point: the form of a weighted update, the same on all members.
        names: the parameters' names, by number.
    """

    def __init__(self, fixed_point: FixedPoint, names: Sequence[str]) -> None:
        self._fixed_point = fixed_point
        self._names = names
        self._masks: Masks | None = None

    def average(
        self,
        link: Link,
        number: int,
        share: Mapping[str, np.float32],
        buckets: Sequence[Bucket],
        produce: Callable[[Bucket], Float32Vector],
        when_posted: Callable[[], None],
        values: Float32Vector,
    ) -> None:
        """As `Exchange.average`.

        Args:
            link: to the members of this attempt; after an attempt that failed, its epoch must be another.
            number, share, produce, when_posted: see there.
            buckets: those that travel, in order.
            values: zeros, for the buckets' means, one after the other.

        Raises:
            NebulaError: fewer than `FEWEST` members are left, or a number does not fit into the fixed point.
            PeerLost: a member is lost, or sent something else.
        """
        if len(link.members) < FEWEST:
            raise NebulaError(
                f"privacy_secure_aggregation needs {FEWEST} clusters and more, of which {' and '.join(link.members)} are "
                "left: what they would exchange now could not be hidden; resume when the others are back"
            )
        if self._masks is None or self._masks.era != (link.epoch, link.members):
            self._masks = Masks.agree(link, number)
        masks, dtype = self._masks, self._fixed_point.dtype

        def encode(index: int) -> memoryview:
            bucket = buckets[index]
            masked = self._encode(bucket, produce(bucket), share[link.cluster], number)
            masks.add(masked, number, bucket.index)
            return masked.data.cast("B")

        at = 0
        for index, member, payload in all_gather(link, Kind.BUCKET, number, len(buckets), encode, when_posted):
            bucket = buckets[index]
            if payload.nbytes != bucket.numel * dtype.itemsize:
                wanted = f"{bucket.numel * dtype.itemsize} bytes of masked numbers, got {payload.nbytes}"
                raise PeerLost(member, f"its bucket {bucket.index} must be {wanted}")
            if member == link.members[0]:
                total = np.zeros(bucket.numel, dtype)
            total += np.frombuffer(payload, dtype)
            if member == link.members[-1]:
                values[at : at + bucket.numel] = self._fixed_point.decode(total)
                at += bucket.numel

    def _encode(self, bucket: Bucket, vector: Float32Vector, share: np.float32, number: int) -> Ring:
        try:
            return self._fixed_point.encode(vector, share)
        except OverflowError as error:
            at: int = error.args[0]
            raise NebulaError(
                f"an update must be at most {self._fixed_point.limit:g} to be hidden by privacy_secure_aggregation, got "
                f"{vector[at]:g} in {self._name(bucket, at)!r} in round {number}: lower the learning rate or set "
                "privacy_clip_norm"
            ) from None

    def _name(self, bucket: Bucket, at: int) -> str:
        """The parameter of a bucket's element."""
        for parameter, start, stop in bucket.pieces:
            if at < stop - start:
                return self._names[parameter]
            at -= stop - start
        raise AssertionError("an element beyond its bucket")
