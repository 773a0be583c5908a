"""Equal parameters at the start: one cluster gives its own to all others."""

from __future__ import annotations

import numpy as np

from paddlenlp_nebula.backend.host import HOST
from paddlenlp_nebula.codec.codec import Float32Vector
from paddlenlp_nebula.errors import ProtocolError
from paddlenlp_nebula.link.frames import Kind
from paddlenlp_nebula.strategy.exchange import Exchange

__all__ = ["spread_parameters"]


def spread_parameters(exchange: Exchange, giver: str, values: Float32Vector) -> None:
    """Send this cluster's selected parameters to all peers, or receive them, always as float32.

    Args:
        exchange: knows the buckets and the link.
        giver: the cluster whose parameters everybody starts from.
        values: filled with the giver's parameters, shape (selection.numel,).

    Raises:
        PeerLost: a cluster is lost, or the giver sent something else.
    """
    link = exchange.party.link
    for bucket in exchange.buckets:
        part = values[bucket.start : bucket.stop]
        if link.cluster == giver:
            part[:] = exchange.backend.to_host(exchange.read(bucket))
            link.post(Kind.PARAMETERS, part.data.cast("B"), part=bucket.index)  # refers to values, no copy
            continue
        with link.receive(giver, Kind.PARAMETERS, part=bucket.index) as message:
            if message.frame.length != part.nbytes:
                raise ProtocolError(
                    f"bucket {bucket.index} from cluster {giver!r} must be {part.nbytes} bytes, "
                    f"got {message.frame.length}"
                )
            part[:] = np.frombuffer(message.payload, dtype="<f4")
            if not HOST.finite(part):
                raise ProtocolError(f"bucket {bucket.index} from cluster {giver!r} must hold finite numbers")
    link.flush()
