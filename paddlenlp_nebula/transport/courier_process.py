"""The courier: the process in which one link's MPI lives. Started by ``courier.py``, never by hand.

Whatever MPI does here, hang, abort or segfault, it does not do to the trainer. The leader sends orders
as records (``doorbells.py``); payload is read from and written to memory that both share. MPI has no
descriptor to sleep on, so the loop polls it, and the socket's ``select`` is the sleep between.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import struct
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ..errors import ProtocolError, SecurityError
from ..security.identity import Credentials, Identity
from .doorbells import Doorbell, Kind, Record, unpack
from .greeting import GREETING_BYTES, TICKET_BYTES, check_greeting, pack_greeting
from .rings import cut

if TYPE_CHECKING:
    from mpi4py import MPI

    from .pump import Pump
    from .sealed import SealedPump

ADDRESS_VARIABLE = "NEBULA_COURIER"
"""Environment variable with the leader's socket and the token: not an argument, which everybody could read."""

_GREETING_TAG = 0x4E41

# The sleep after a look at MPI that found nothing: a share of the time for which nothing has moved. A look costs
# about 70 us of one core: a silent courier takes below 1 % of it at 10 ms. The shortest sleep leaves cores shared with
# trainers to them: the kernel's buffers hold what a fast link brings meanwhile (0.6 MB at 10 Gbit/s). A waiting send is
# looked after more often, for MPI refills the kernel's buffers only when looked at.
_SHARE = 1 / 32
_SHORTEST_PAUSE_S = 0.5e-3
_SENDING_PAUSE_S = 2e-3
_SILENT_PAUSE_S = 10e-3

_SHARED = "/dev/shm"
_SHARED_BYTES = 4 << 20  # MPICH maps 1.06 MB of it (measured); several couriers may start at once


class Lost(Exception):
    """The link cannot go on; the text goes to the leader."""


def start_mpi() -> None:
    """Initialise MPI and leave no file of it behind, however this process ends.

    Raises:
        Lost: this MPI cannot join two separate jobs, or has no room to start.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    version = MPI.Get_library_version()
    if "Open MPI" in version:
        raise Lost(
            "its courier needs MPICH but mpi4py found Open MPI, which cannot join two separate jobs; "
            "install the package 'mpich' in this environment"
        )
    refuse_little_shared_memory()
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    # MPICH maps a file that it removes only in MPI_Finalize, which a courier rarely reaches.
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if f"{_SHARED}/mpich_shm_" in line}
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def refuse_little_shared_memory(folder: str = _SHARED) -> None:
    """Say what MPI would not: where its file does not fit, writing to it ends the process without a word (SIGBUS).

    Args:
        folder: where MPICH keeps its file; it is not looked at if it is not there.

    Raises:
        Lost: the folder is read-only or too full.
    """
    try:
        room = os.statvfs(folder)
    except OSError:
        return
    free = room.f_bavail * room.f_frsize
    if room.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        found = "it is read-only; mount it writable (docker: --tmpfs /dev/shm)"
    elif free < _SHARED_BYTES:
        found = f"got {free / 1e6:.1f} MB; remove old files there, or start the container with --shm-size=2g"
    else:
        return
    raise Lost(f"MPI in its courier needs {_SHARED_BYTES / 1e6:.1f} MB free in {folder}, but {found}")


class Courier:
    """Obeys one leader and moves chunks for it, under TLS if it has been given an identity."""

    def __init__(
        self,
        bell: Doorbell,
        memory: mmap.mmap,
        chunks: int,
        chunk_bytes: int,
        peer: str,
        credentials: Credentials | None,
    ) -> None:
        view = memoryview(memory)
        half = chunks * chunk_bytes
        self._bell = bell
        self._chunk_bytes = chunk_bytes
        self._send_slots = cut(view[:half], chunks, chunk_bytes)
        self._receive_slots = cut(view[half:], chunks, chunk_bytes)
        self._peer = peer
        self._identity = Identity(credentials, self._note) if credentials is not None else None
        self._pump: Pump | SealedPump | None = None
        self._connected = False
        self._port, self._ticket = "", b""
        self._given: set[int] = set()  # receive slots that the leader holds
        self._sending_s = 0.0  # time in which chunks were on their way, up to the last look at them
        self._looked_at = 0.0

    def run(self) -> None:
        """Work until the leader has gone.

        Raises:
            Lost: MPI or the peer failed.
        """
        moved_at = time.monotonic()
        while not self._bell.closed:
            if self._obey() | self._move():
                moved_at = time.monotonic()
            else:
                self._rest(time.monotonic() - moved_at)

    def _rest(self, quiet_s: float) -> None:
        blocked = [] if self._bell.flush() else [self._bell.socket]
        pause_s = self._pause_s(quiet_s)
        if pause_s == _SHORTEST_PAUSE_S:
            time.sleep(pause_s)  # in full: while chunks flow, an order can wait, and waking up for each costs more
        else:
            select.select([self._bell.socket], blocked, [], pause_s)

    def _pause_s(self, quiet_s: float) -> float | None:
        if self._pump is None:
            return None
        longest = _SENDING_PAUSE_S if self._pump.sending else _SILENT_PAUSE_S
        return min(longest, max(_SHORTEST_PAUSE_S, _SHARE * quiet_s))

    def _obey(self) -> bool:
        moved = False
        while (order := self._bell.read()) is not None:
            moved = True
            if order.kind is Kind.SEND and self._pump is not None:
                if order.slot >= len(self._send_slots) or not 1 <= order.number <= self._chunk_bytes:
                    raise ProtocolError(f"no chunk {order.slot} of {order.number} bytes")
                if not self._pump.sending:
                    self._looked_at = time.monotonic()
                self._pump.send(order.slot, self._send_slots[order.slot][: order.number])
            elif order.kind is Kind.FREE and self._pump is not None:
                self._given.remove(order.slot)
                self._pump.repost(order.slot)
            elif self._pump is None:
                self._join(order)
            else:
                raise ProtocolError(f"{order.kind.name} does not fit here")
        return moved

    def _join(self, order: Record) -> None:
        from mpi4py import MPI

        if order.kind is Kind.OPEN:
            self._port, self._ticket = MPI.Open_port(), secrets.token_bytes(TICKET_BYTES)
            self._bell.post(Record(Kind.PORT, text=f"{self._ticket.hex()} {self._port}"))
        elif order.kind is Kind.ACCEPT:
            info = MPI.Info.Create()
            info.Set("timeout", str(order.number // 1000 + 2))  # only if the leader's own deadline fails
            self._greet(MPI.COMM_SELF.Accept(self._port, info), accepts=True)
            MPI.Close_port(self._port)
        elif order.kind is Kind.CONNECT:
            ticket, _, port = order.text.partition(" ")
            try:
                self._ticket = bytes.fromhex(ticket)
            except ValueError:
                raise ProtocolError("the port that came through the door is not a courier's") from None
            self._greet(MPI.COMM_SELF.Connect(port), accepts=False)
        else:
            raise ProtocolError(f"{order.kind.name} does not fit here")

    def _greet(self, comm: MPI.Intercomm, *, accepts: bool) -> None:
        """Have the other end proved to be the courier that is meant, with chunks of the same size, before any chunk flows."""
        from mpi4py import MPI

        from .pump import Pump, seal

        comm.Set_errhandler(MPI.ERRORS_RETURN)
        if comm.Get_remote_size() != 1:
            raise Lost(f"expected one process at the other end, got {comm.Get_remote_size()}")
        greeting = pack_greeting(self._chunk_bytes, self._ticket)
        check = partial(check_greeting, chunk_bytes=self._chunk_bytes, ticket=self._ticket)
        if self._identity is None:
            check(_exchange(comm, greeting))
            self._pump = Pump(comm, 0, len(self._send_slots), self._receive_slots)
        else:
            who = f"cluster {self._peer!r}"
            session = partial(self._identity.session, server_side=accepts, allowed=[self._peer], peer=who)
            self._pump, _ = seal(
                comm, 0, self._receive_slots, new_session=session, greeting=greeting, check=check, note=self._note
            )

    def _note(self, sentence: str) -> None:
        self._bell.post(Record(Kind.NOTE, text=sentence))

    def _move(self) -> bool:
        if self._pump is None:
            return False
        sent, received = self._pump.test()
        if self._pump.ready and not self._connected:
            self._connected = True
            self._bell.post(Record(Kind.CONNECTED))
        if sent:
            now = time.monotonic()
            self._sending_s += now - self._looked_at
            self._looked_at = now
        for slot in sent:
            self._bell.post(Record(Kind.SENT, slot, round(1e6 * self._sending_s)))
        for slot, nbytes in received:
            self._given.add(slot)
            self._bell.post(Record(Kind.RECEIVED, slot, nbytes))
        return bool(sent or received)


def _exchange(comm: MPI.Intercomm, greeting: bytes) -> bytearray:
    """Send our greeting in the clear and return the other end's."""
    from mpi4py import MPI

    theirs = bytearray(GREETING_BYTES)
    requests = [
        comm.Irecv([theirs, len(theirs), MPI.BYTE], 0, _GREETING_TAG),
        comm.Isend([greeting, len(greeting), MPI.BYTE], 0, _GREETING_TAG),
    ]
    while not MPI.Request.Testall(requests):
        time.sleep(0.5e-3)  # the leader's deadline bounds this
    return theirs


def guard(packets: socket.socket, leader: int, launcher: int) -> None:
    """Start a thread that ends this process and its mpiexec as soon as the leader is gone, even inside MPI."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: mpiexec's end is ours
    watched = select.poll()
    watched.register(os.pidfd_open(leader), select.POLLIN)
    watched.register(packets, select.POLLRDHUP)
    mpiexec = os.pidfd_open(launcher)  # its number may be another's by the time it is needed

    def watch() -> None:
        watched.poll()
        end(mpiexec)

    threading.Thread(target=watch, daemon=True).start()


def end(mpiexec: int) -> NoReturn:
    """End mpiexec (a pidfd), then this process, without a chance for MPI to hang in its clean-up."""
    try:
        signal.pidfd_send_signal(mpiexec, signal.SIGKILL)
    finally:
        os._exit(1)


def greet_leader() -> tuple[socket.socket, int]:
    """Connect to the leader that started this process: the socket, and the leader's pid."""
    name, token = os.environ.pop(ADDRESS_VARIABLE).split(":")
    packets = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    packets.connect(f"\0{name}")
    pid, uid, _ = struct.unpack("3i", packets.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise SystemExit("the leader's socket belongs to another user")
    Doorbell(packets).post(Record(Kind.HELLO, number=os.getpid(), text=token))
    packets.setblocking(True)
    return packets, pid


def main() -> None:
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, 0)
    )  # a segfault of MPI is expected; a file of it, keys and all, is not
    packets, leader = greet_leader()
    packet, descriptors, _, _ = socket.recv_fds(packets, 4096, 2)
    setup = unpack(packet)
    if setup.kind is not Kind.SETUP or len(descriptors) not in (1, 2):
        raise SystemExit("expected the set-up record from the leader")
    launcher, _, peer = setup.text.partition(" ")
    guard(packets, leader, int(launcher))
    bell = Doorbell(packets)
    try:
        credentials = _read_credentials(descriptors[1]) if len(descriptors) == 2 else None
        start_mpi()
        memory = mmap.mmap(descriptors[0], 2 * setup.slot * setup.number)
        os.close(descriptors[0])
        Courier(bell, memory, setup.slot, setup.number, peer, credentials).run()
    except (Lost, ProtocolError, SecurityError) as loss:
        bell.post(Record(Kind.LOST, text=str(loss)))
    except Exception as error:
        what = str(error).splitlines()[0].removesuffix(", error stack:") if str(error) else type(error).__name__
        bell.post(Record(Kind.LOST, text=f"MPI in its courier failed: {what}"))
    packets.setblocking(True)
    bell.flush()
    os._exit(0)  # the leader reads the last record, sees the end, and kills mpiexec


def _read_credentials(descriptor: int) -> Credentials:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return Credentials.parse(file.read())


if __name__ == "__main__":
    main()
