"""Start one courier under its own mpiexec, keep its last words, and end all of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import NebulaError
from .courier_process import ADDRESS_VARIABLE

__all__ = ["Launch", "courier_environment", "find_mpiexec"]

_LOG_BYTES = 4096
# What an outer mpiexec, of any maker, tells its own processes; a courier is nobody's rank.
_FOREIGN = ("PMI", "HYD", "MPI", "OMPI_", "OPAL_", "PRTE_", "PRRTE_")
_USERS_OWN = ("MPIR_CVAR_", "MPI4PY_")
_DEFAULTS = {
    # Plain sockets, also between two jobs on one host: the same everywhere, and a killed peer does not crash
    # the survivor. (With "ucx" instead, jobs on one host use shared memory unless MPIR_CVAR_NOLOCAL=1.)
    # On a host with several networks FI_TCP_IFACE names the one that the other site can reach.
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    # What arrives before there is a chunk for it waits in TCP's window. By default MPI would take it into memory of
    # its own, up to 64 messages without a limit to their size, and copy it once more from there.
    "FI_TCP_MAX_SAVED": "0",
    "MPIR_CVAR_ENABLE_GPU": "0",
    # TLS makes and drops a megabyte for each chunk: glibc should keep it rather than have the kernel clear a new one.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Lines that Hydra prints about every process that dies; the interesting line stands before them.
_NOISE = ("=", "YOUR APPLICATION TERMINATED", "This typically refers", "Please see the FAQ")


def find_mpiexec() -> list[str]:
    """The mpiexec of this Python's environment, else the one on PATH, with its arguments for one local process.

    MPICH's gforker is preferred where it is installed: it has no proxy process and, unlike Hydra, opens no TCP port.

    Raises:
        NebulaError: there is none.
    """
    beside = Path(sys.executable).parent
    for folder in (str(beside), None):
        for name, options in (("mpiexec.gforker", []), ("mpiexec", ["-launcher", "fork", "-rmk", "user"])):
            found = shutil.which(name, path=folder)
            if found is not None:
                return [found, *options]
    raise NebulaError(
        f"no mpiexec next to {sys.executable} or on PATH; install MPICH there, for example with 'pip install mpich'"
    )


def courier_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without traces of an outer mpiexec, with the courier's defaults where the user set none."""
    kept = {
        name: value
        for name, value in environment.items()
        if name.startswith(_USERS_OWN) or not name.startswith(_FOREIGN)
    }
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *(str(Path(path).resolve()) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path)]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    return _DEFAULTS | kept | dict.fromkeys(_ONE_THREAD, "1")


class Launch:
    """One ``mpiexec -n 1 python -m paddlenlp_nebula.transport.courier_process`` in a session of its own.

    Args:
        address: the leader's socket and the token, handed on in the environment.
        mpiexec: the command and its options; None looks for one.

    Raises:
        NebulaError: it cannot be started.
    """

    def __init__(self, address: str, mpiexec: list[str] | None = None) -> None:
        command = [
            *(find_mpiexec() if mpiexec is None else mpiexec),
            *("-n", "1", sys.executable, "-m", f"{__package__}.courier_process"),
        ]
        self._log = bytearray()
        self.log_fd, write_fd = os.pipe()
        os.set_blocking(self.log_fd, False)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                cwd="/",
                env={**courier_environment(os.environ), ADDRESS_VARIABLE: address},
                start_new_session=True,
            )
        except OSError as error:
            os.close(self.log_fd)
            raise NebulaError(f"the courier's {command[0]} cannot be started: {error}") from error
        finally:
            os.close(write_fd)
        self.pid = self._process.pid
        self.exit_fd = os.pidfd_open(self.pid)
        self._courier: int | None = None
        self._courier_fd: int | None = None
        self._over = False

    def read_log(self) -> bool:
        """Take in what has been printed; False at its end."""
        with suppress(BlockingIOError):
            while data := os.read(self.log_fd, _LOG_BYTES):
                self._log += data
                del self._log[:-_LOG_BYTES]
            return False
        return True

    def last_words(self) -> str:
        """The last line printed that means something, or ""."""
        lines = [line.strip() for line in self._log.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith(_NOISE)), "")

    def status(self) -> int | None:
        """mpiexec's exit status (negative: the signal), or None while it runs."""
        if self._process.returncode is None:
            # Looked at, not reaped: as long as it is a zombie its process group's number cannot become another's.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._process.returncode

    def adopt(self, courier: int) -> None:
        """Remember the process under mpiexec, which has said hello."""
        with suppress(ProcessLookupError):
            self._courier_fd = os.pidfd_open(courier)
            self._courier = courier

    def kill(self) -> None:
        """End mpiexec and all below it, at once, and leave no zombie. Idempotent."""
        if self._over:
            return
        with suppress(ProcessLookupError):
            if self._courier_fd is not None:  # under Hydra it is in another process group than mpiexec
                signal.pidfd_send_signal(self._courier_fd, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        if self._courier is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._courier, os.WNOHANG)  # ours only where the trainer is a container's process 1
        self.forget()

    def forget(self) -> None:
        """Close the descriptors and leave the processes alone, as a forked child must. Idempotent."""
        if self._over:
            return
        self._over = True
        for fd in (self.log_fd, self.exit_fd, self._courier_fd):
            if fd is not None:
                os.close(fd)
        if self._process.returncode is None:
            self._process.returncode = 0  # or Popen would try to wait for a process that is not this one's child
