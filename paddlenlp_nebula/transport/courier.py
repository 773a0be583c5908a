"""The default transport: MPI in a helper process per link, the courier, which may die without harm.

The leader starts it, talks to it in records over a Unix socket (``doorbells.py``) and shares the chunks'
memory with it. Nothing here waits: ``progress`` moves the joining steps as well as the chunks.

    channel = CourierChannel("east")          # both sides
    channel.open_port()                       # one side: ``port`` is there after some calls of progress()
    channel.accept(timeout_s=30)              # the same side, once the other has the port
    channel.connect(port, timeout_s=30)       # the other side
    ... progress() until connected, then the Channel contract
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from typing import IO

from ..errors import NebulaError, ProtocolError
from ..forking import close_in_children
from ..security.identity import Credentials
from .channel import CHUNK_BYTES, CHUNKS
from .doorbells import Doorbell, Kind, Record, pack, unpack
from .launch import Launch
from .rings import RingChannel, cut

__all__ = ["CourierChannel"]

_START_S = 60.0  # Python, mpi4py and MPI_Init take 0.3 s on an idle machine
_NOT_STARTED = f"its courier did not start within {_START_S:g} s; check that mpiexec and mpi4py work here"
_LAST_RECORDS_S = 0.3  # between the courier's end and mpiexec's exit status


class CourierChannel(RingChannel):
    """A channel through a courier; the constructor starts it and returns at once.

    Args:
        peer: name of the cluster at the other end.
        chunk_bytes: capacity of one chunk, the same at both ends (checked when they meet).
        chunks: chunks in flight per direction; 2 * chunks * chunk_bytes of memory, touched as it is used.
        mpiexec: the command that starts one MPI process; None takes this Python's own (MPICH).
        credentials: for TLS; None leaves the link plain.

    Attributes:
        port: the MPI port and the ticket for it, after ``open_port`` and some ``progress``.
        connected: whether both couriers have met.

    Raises:
        NebulaError: the courier cannot be started, or there is no memory to share with it.
    """

    def __init__(
        self,
        peer: str,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
        *,
        mpiexec: list[str] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        if chunk_bytes < 1 or chunks < 1:
            raise ValueError(f"chunk_bytes and chunks must be at least 1, got {chunk_bytes} and {chunks}")
        self._memory_fd, self._memory = _sealed_memory(2 * chunks * chunk_bytes)
        view, half = memoryview(self._memory), chunks * chunk_bytes
        super().__init__(peer, cut(view[:half], chunks, chunk_bytes), cut(view[half:], chunks, chunk_bytes))
        self.port: str | None = None
        self.connected = False
        self._credentials = credentials
        self._orders: list[Record] = []  # until the courier has said hello
        self._bell: Doorbell | None = None
        self._ended_at: float | None = None
        self._with_courier: set[int] = set(range(chunks))  # receive slots that it may fill
        self._deadline = time.monotonic() + _START_S
        self._waiting_for: str | None = _NOT_STARTED
        # An abstract name leaves no file behind. It is visible to others on this machine, hence the token.
        name, self._token = f"nebula-{secrets.token_hex(16)}", secrets.token_hex(32)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(4)
        self._listener.setblocking(False)
        try:
            self._launch = Launch(f"{name}:{self._token}", mpiexec)
        except BaseException:
            self._closed = True
            self._listener.close()
            os.close(self._memory_fd)
            raise
        self._epoll = select.epoll()
        for fd in (self._listener.fileno(), self._launch.log_fd, self._launch.exit_fd):
            self._epoll.register(fd, select.EPOLLIN)
        close_in_children(self)  # or a dead trainer would look alive

    @property
    def launcher(self) -> int:
        """Process id of the courier's mpiexec, which is also its process group."""
        return self._launch.pid

    def open_port(self) -> None:
        """Ask for an MPI port; ``port`` holds it later. It can be accepted on once."""
        self._order(Record(Kind.OPEN))

    def accept(self, timeout_s: float) -> None:
        """Wait for the peer to connect to ``port``; call it when the peer has the port, for MPI waits busily.

        Args:
            timeout_s: seconds until the channel is lost.
        """
        self._await(timeout_s, f"cluster {self.peer!r} did not connect within {timeout_s:g} s")
        self._order(Record(Kind.ACCEPT, number=int(timeout_s * 1000)))

    def connect(self, port: str, timeout_s: float) -> None:
        """Connect to the peer's port.

        Args:
            port: what the peer's ``port`` says.
            timeout_s: seconds until the channel is lost.
        """
        self._await(timeout_s, f"cluster {self.peer!r} did not accept within {timeout_s:g} s")
        self._order(Record(Kind.CONNECT, text=port))

    def _await(self, timeout_s: float, otherwise: str) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._waiting_for = f"{otherwise}; check that it runs and that firewalls let MPI's TCP ports through"

    def _order(self, order: Record) -> None:
        if self._bell is None:
            self._orders.append(order)
        else:
            self._bell.post(order)

    def _submit(self, slot: int, nbytes: int) -> None:
        self._order(Record(Kind.SEND, slot, nbytes))

    def _repost(self, slot: int) -> None:
        self._with_courier.add(slot)
        self._order(Record(Kind.FREE, slot))

    def reserve(self) -> memoryview | None:
        return super().reserve() if self.connected else None

    def free_chunks(self) -> int:
        return super().free_chunks() if self.connected else 0

    def _move(self) -> None:
        ready = {fd for fd, _ in self._epoll.poll(0)}
        if self._bell is None and self._listener.fileno() in ready:
            self._welcome()
        if self._launch.log_fd in ready and not self._launch.read_log():
            self._epoll.unregister(self._launch.log_fd)
        try:
            self._listen()
        except ProtocolError as error:
            self._lose(f"{error}; this is a fault in paddlenlp-nebula or in its courier's memory")
        if self._launch.exit_fd in ready or (self._bell is not None and self._bell.closed):
            self._explain_end()
        if self._waiting_for is not None and time.monotonic() > self._deadline:
            self._lose(self._waiting_for)
        if self._loss is not None:
            self._launch.kill()  # it may sit in MPI for ever; what it has delivered can still be read

    def _welcome(self) -> None:
        """Let in whoever proves to be the courier, and send it what it needs."""
        with suppress(OSError):
            packets, _ = self._listener.accept()
            pid, uid, _ = struct.unpack("3i", packets.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            packets.settimeout(0.5)  # the courier speaks first, and at once
            if uid != os.getuid() or not self._is_hello(packets.recv(4096)):
                packets.close()
                return
            words = f"{self._launch.pid} {self.peer}"
            setup = pack(Record(Kind.SETUP, len(self._send_slots), self.chunk_bytes, words))
            with ExitStack() as files:
                secrets = [files.enter_context(_memory_file(self._credentials.pack()))] if self._credentials else []
                socket.send_fds(packets, [setup], [self._memory_fd, *(file.fileno() for file in secrets)])
            self._launch.adopt(pid)
            self._bell = bell = Doorbell(packets)
            self._epoll.unregister(self._listener.fileno())
            self._listener.close()
            self._epoll.register(packets.fileno(), select.EPOLLIN)
            if self._waiting_for == _NOT_STARTED:
                self._waiting_for = None
            while self._orders:
                bell.post(self._orders.pop(0))

    def _is_hello(self, packet: bytes) -> bool:
        try:
            hello = unpack(packet)
        except ProtocolError:
            return False
        return hello.kind is Kind.HELLO and hmac.compare_digest(hello.text.encode(), self._token.encode())

    def _listen(self) -> None:
        if self._bell is None:
            return
        self._bell.flush()
        while (record := self._bell.read()) is not None:
            if record.kind is Kind.SENT and record.slot in self._in_flight:
                self._sent(record.slot)
                self.seconds_sending = 1e-6 * record.number
            elif record.kind is Kind.RECEIVED and self._fits(record):
                self._with_courier.remove(record.slot)
                self._arrived(record.slot, record.number)
            elif record.kind is Kind.PORT and self.port is None:
                self.port = record.text
            elif record.kind is Kind.CONNECTED and not self.connected:
                self.connected, self._waiting_for = True, None
            elif record.kind is Kind.LOST:
                self._lose(record.text)
            elif record.kind is Kind.NOTE:
                self.notes.append(record.text)
            else:
                raise ProtocolError(f"its courier said {record.kind.name} {record.slot} {record.number} out of turn")

    def _fits(self, record: Record) -> bool:
        return self.connected and record.slot in self._with_courier and 1 <= record.number <= self.chunk_bytes

    def _explain_end(self) -> None:
        """The courier has gone: give mpiexec a moment to say how, then call the channel lost."""
        status = self._launch.status()
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        if status is None and now < self._ended_at + _LAST_RECORDS_S:
            return
        with suppress(OSError):
            self._launch.read_log()
        how = "" if status is None else f" (mpiexec ended with {status})"
        words = self._launch.last_words()
        self._lose(f"its courier ended{how}" + (f", last words: {words}" if words else ""))

    def fileno(self) -> int | None:
        return None if self._closed else self._epoll.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_sockets()
        self._launch.kill()

    def _drop_sockets(self) -> None:
        if self._bell is not None:
            self._bell.close()
        self._listener.close()
        self._epoll.close()
        os.close(self._memory_fd)
        self._send_slots.clear()
        self._receive_slots.clear()
        with suppress(BufferError):
            self._memory.close()  # else with the last view that somebody holds

    def close_in_child(self) -> None:
        """In a forked data worker: let go of everything, touch nothing that belongs to the parent."""
        if not self._closed:
            self._closed = True
            self._drop_sockets()
            self._launch.forget()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():  # at the end the courier goes by itself
            self.close()


def _memory_file(content: bytes) -> IO[bytes]:
    """A file without a name, for a secret: only who is given its descriptor can read it."""
    file = open(os.memfd_create("nebula", os.MFD_CLOEXEC), "w+b")  # noqa: SIM115  # the caller closes it
    file.write(content)
    file.flush()
    return file


def _sealed_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    """Anonymous shared memory whose size nobody can change: a shrunk one would kill its reader with SIGBUS.

    It is a memfd: the size of /dev/shm does not limit it, a process' own limits do.
    """
    fd = os.memfd_create("nebula", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise NebulaError(
            f"a link needs {nbytes / 1e6:.1f} MB of memory shared with its courier, got {error.strerror!r}: raise this "
            "process' limits (ulimit -f, ulimit -v)"
        ) from error
