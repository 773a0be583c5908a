"""One mpiexec over all leaders, MPI inside the leader process: for schedulers that start jobs this way.

Faster to join than couriers, and with Open MPI the only way; but MPI's failures are this process's
failures. Under MPICH the death of one leader ends all of them; so it does under Open MPI without
``--with-ft ulfm``. Everything is point-to-point, non-blocking and polled.
"""

from __future__ import annotations

import atexit
import os
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import NebulaError, SecurityError
from ..security.identity import Identity
from ..security.session import Session
from .channel import CHUNK_BYTES, CHUNKS, Channel
from .greeting import check_greeting, pack_greeting
from .rings import RingChannel, cut

if TYPE_CHECKING:
    from mpi4py import MPI

    from .pump import Pump
    from .sealed import SealedPump

__all__ = ["NAME_BYTES", "WorldChannel", "join_world"]

NAME_BYTES = 64
"""Longest cluster name, in UTF-8."""

_CARD = struct.Struct(f"<{NAME_BYTES}sQ?")  # name, chunk_bytes, TLS
_CARD_TAG = 0x4E43
_POLL_S = 1e-3

# Requests that MPI may still work on after their channel was closed: their memory must outlive them.
_unfinished: list[MPI.Request] = []


class WorldChannel(RingChannel):
    """A channel to another rank; made by :func:`join_world`. Has no descriptor: poll it."""

    def __init__(
        self,
        peer: str,
        comm: MPI.Comm,
        rank: int,
        chunk_bytes: int,
        chunks: int,
        new_session: Callable[[], Session] | None,
    ) -> None:
        from .pump import Pump, seal

        memory = [memoryview(bytearray(chunks * chunk_bytes)) for _ in range(2)]
        super().__init__(peer, *(cut(half, chunks, chunk_bytes) for half in memory))
        self._pump: Pump | SealedPump
        if new_session is None:
            self._pump = self._wire = Pump(comm, rank, chunks, self._receive_slots)
        else:
            self._pump, self._wire = seal(
                comm,
                rank,
                self._receive_slots,
                new_session=new_session,
                greeting=pack_greeting(chunk_bytes),
                check=lambda theirs: check_greeting(theirs, chunk_bytes),
                note=self.notes.append,
            )

    def settle(self) -> bool:
        """Go on with the handshake; whether chunks can flow, or never will."""
        self._move()
        return self._pump.ready or self._loss is not None

    def _submit(self, slot: int, nbytes: int) -> None:
        self._guarded(lambda: self._pump.send(slot, self._send_slots[slot][:nbytes]))

    def _repost(self, slot: int) -> None:
        self._guarded(lambda: self._pump.repost(slot))

    def _move(self) -> None:
        self._guarded(self._test)

    def _test(self) -> None:
        sent, received = self._pump.test()
        for slot in sent:
            self._sent(slot)
        for slot, nbytes in received:
            self._arrived(slot, nbytes)

    def _guarded(self, action: Callable[[], None]) -> None:
        from mpi4py import MPI

        from .pump import PeerClosed

        try:
            action()
        except PeerClosed:
            self._lose("the other side has closed it")
        except MPI.Exception as error:
            self._lose(f"MPI failed: {error.Get_error_string()}")
        except NebulaError as error:
            self._lose(str(error))

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._guarded(lambda: _unfinished.extend(self._wire.close()))


def join_world(
    cluster: str,
    clusters: Sequence[str],
    timeout_s: float,
    chunk_bytes: int = CHUNK_BYTES,
    chunks: int = CHUNKS,
    identity: Identity | None = None,
) -> dict[str, Channel]:
    """Meet the other leaders of this process's ``mpiexec``; starts MPI if nobody has.

    Args:
        cluster: this cluster's name, at most 64 bytes.
        clusters: all names; as many as there are MPI processes, in any order of ranks.
        timeout_s: seconds to wait for the others. MPI_Init itself waits for all processes to start and
            knows no deadline.
        chunk_bytes: capacity of one chunk, the same everywhere (checked).
        chunks: chunks in flight per direction and peer; 2 * chunks * chunk_bytes of memory per peer.
        identity: for TLS; None leaves the channels plain.

    Returns:
        One channel per other cluster, by its name.

    Raises:
        NebulaError: a leader did not come in time, or the processes do not fit the names.
        SecurityError: a leader is not who it says, or takes us for somebody else.
    """
    from mpi4py import rc

    rc.initialize = False
    from mpi4py import MPI

    if len(cluster.encode()) > NAME_BYTES or cluster not in clusters:
        raise NebulaError(
            f"expected a name of at most {NAME_BYTES} bytes out of {', '.join(clusters)}, got {cluster!r}"
        )
    _start()
    world = MPI.COMM_WORLD
    if world.Get_size() != len(clusters):
        raise NebulaError(
            f"expected one MPI process for each of the {len(clusters)} clusters {', '.join(clusters)}, got a world of "
            f"{world.Get_size()}; start all leaders with one 'mpiexec -n {len(clusters)}'"
        )
    deadline = time.monotonic() + timeout_s
    cards = _exchange_cards(world, _CARD.pack(cluster.encode(), chunk_bytes, identity is not None), deadline)
    names = _check_cards(cards, cluster, clusters, chunk_bytes, identity is not None, timeout_s)
    # A communicator of our own, so that nothing left over from another run, or of the user's, can be
    # taken for a chunk. Everybody is here by now; still, it is waited for like everything else.
    comm, request = world.Idup()
    if not _poll(lambda: bool(request.Test()), max(deadline, time.monotonic() + 1)):
        raise NebulaError(f"the leaders of {', '.join(clusters)} met but then one was silent; see the others' logs")
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    channels: dict[str, WorldChannel] = {}
    for rank, name in enumerate(names):
        if name != cluster:
            new_session = None if identity is None else _sessions(identity, clusters, name)
            channels[name] = WorldChannel(name, comm, rank, chunk_bytes, chunks, new_session)
    unsettled = list(channels.values())
    settled = _poll(lambda: not _settle(unsettled), deadline)
    if settled and all(channel.loss is None for channel in channels.values()):
        return dict(channels)
    for channel in channels.values():
        channel.close()
    for name, channel in channels.items():
        if (loss := channel.loss) is not None:
            raise SecurityError(f"cluster {cluster!r} cannot be joined with cluster {name!r}: {loss}")
    raise NebulaError(f"the leaders of {', '.join(clusters)} met, but not all spoke TLS within {timeout_s:g} s")


def _settle(channels: list[WorldChannel]) -> list[WorldChannel]:
    """Those whose handshake goes on; the others are taken out."""
    channels[:] = [channel for channel in channels if not channel.settle()]
    return channels


def _sessions(identity: Identity, clusters: Sequence[str], peer: str) -> Callable[[], Session]:
    """Makes the sessions with a peer; the earlier of two clusters has the server's part."""
    order = list(clusters)
    serves = order.index(identity.cluster) < order.index(peer)
    return partial(identity.session, server_side=serves, allowed=[peer], peer=f"cluster {peer!r}")


def _start() -> None:
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise NebulaError("MPI has already been finalized in this process; start a new one for another run")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize, os.getpid())
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)


def _finalize(pid: int) -> None:
    """At exit: a process that leaves without MPI_Finalize counts as crashed, one whose peer is gone hangs in it."""
    from mpi4py import MPI

    if os.getpid() != pid or MPI.Is_finalized():
        return
    if _poll(lambda: bool(MPI.Request.Testall(_unfinished)), time.monotonic() + 1):
        MPI.Finalize()


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _exchange_cards(world: MPI.Comm, card: bytes, deadline: float) -> list[bytes | None]:
    """Every rank's card, None where it did not come by the deadline."""
    from mpi4py import MPI

    ranks = range(world.Get_size())
    mine = bytearray(card)
    cards = [bytearray(_CARD.size) for _ in ranks]
    receives = [world.Irecv([cards[rank], _CARD.size, MPI.BYTE], rank, _CARD_TAG) for rank in ranks]
    sends = [world.Isend([mine, _CARD.size, MPI.BYTE], rank, _CARD_TAG) for rank in ranks]
    arrived = [False for _ in ranks]

    def look() -> bool:
        for rank in ranks:
            arrived[rank] = arrived[rank] or bool(receives[rank].Test())
        return all(arrived)

    _poll(look, deadline)
    for rank in ranks:
        if not arrived[rank]:
            receives[rank].Cancel()
            _unfinished.append(receives[rank])
    _unfinished.extend(sends)
    return [bytes(card) if there else None for card, there in zip(cards, arrived, strict=True)]


def _check_cards(
    cards: Sequence[bytes | None],
    cluster: str,
    clusters: Sequence[str],
    chunk_bytes: int,
    tls: bool,
    timeout_s: float,
) -> list[str]:
    """The names by rank, or the error that says what does not fit."""
    names: list[str] = []
    for rank, card in enumerate(cards):
        if card is None:
            continue
        raw, size, secure = _CARD.unpack(card)
        name = raw.rstrip(b"\0").decode(errors="replace")
        if name not in clusters or name in names:
            what = "is already taken" if name in names else f"is not one of {', '.join(clusters)}"
            raise NebulaError(
                f"MPI process {rank} says it is cluster {name!r}, which {what}; give every leader its own name"
            )
        if size != chunk_bytes:
            raise NebulaError(
                f"chunks of cluster {name!r} have {size} bytes but {chunk_bytes} at {cluster!r}; "
                "give all clusters the same value"
            )
        if secure != tls:
            with_tls, without = (name, cluster) if secure else (cluster, name)
            raise NebulaError(
                f"cluster {with_tls!r} has sync_security='tls' but cluster {without!r} 'none'; set the same on all clusters"
            )
        names.append(name)
    if missing := [name for name in clusters if name not in names]:
        raise NebulaError(
            f"cluster {cluster!r} waited {timeout_s:g} s for {', '.join(missing)}; see whether their training has begun"
        )
    return names
