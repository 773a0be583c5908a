"""The errors a user can meet. Each message is one sentence: expected, got, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ChannelLost",
    "ConfigurationError",
    "HandshakeError",
    "NebulaError",
    "PeerLost",
    "ProtocolError",
    "SecurityError",
]


class NebulaError(RuntimeError):
    """Base of every error that paddlenlp_nebula raises on purpose."""


class ConfigurationError(NebulaError):
    """Everything that is wrong with a configuration, found before anything starts.

    Args:
        problems: one sentence per problem, each naming the field, its value and what is allowed.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "the configuration has a problem" if count == 1 else f"the configuration has {count} problems"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class HandshakeError(NebulaError):
    """The clusters do not agree on what they are about to train."""


class ProtocolError(NebulaError):
    """Bytes from a peer do not parse, or are not what the protocol expects at this point."""


class SecurityError(NebulaError):
    """The other side is not who it should be, or what arrives is not what was sent; or our own keys are not in order.

    Args:
        sentence: expected, got, what to do.
        category: the same for all cases of one sort, in a few words without anything from the other side ("an expired
            certificate"): refusals are counted by it.
    """

    def __init__(self, sentence: str, category: str = "a failed TLS handshake") -> None:
        self.category = category
        super().__init__(sentence)


class ChannelLost(NebulaError):
    """A channel to one peer can carry nothing more.

    Args:
        peer: name of the cluster at the other end.
        reason: what was observed, as the end of a sentence ("its courier exited with 139").
    """

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"the channel to cluster {peer!r} is lost: {reason}")


class PeerLost(NebulaError):
    """A cluster has left the run, or can no longer be reached.

    Args:
        peer: name of the lost cluster.
        reason: what was observed or what the cluster itself gave as its reason.
        deliberate: the cluster said goodbye because its training is over, rather than failed.
        also: others that are lost at the same moment: to lose one after the other would break up those who stay.
    """

    def __init__(self, peer: str, reason: str, *, deliberate: bool = False, also: Sequence[PeerLost] = ()) -> None:
        self.peer = peer
        self.reason = reason
        self.deliberate = deliberate
        self.also = tuple(also)
        super().__init__(f"cluster {peer!r} is gone: {reason}")
