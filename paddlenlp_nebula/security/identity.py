"""Who we are and whom we trust: the files behind a cluster's TLS, and the sessions made from them.

Only ``ssl`` is needed here, for couriers load this, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.files import check_private
from paddlenlp_nebula.security.session import Session

__all__ = ["Credentials", "Identity"]


@dataclass(frozen=True)
class Credentials:
    """A cluster's name, and the files that prove it.

    Attributes:
        cluster: its name.
        ca: PEM file with the certificates of the CAs that are trusted; usually one.
        cert: PEM file with this cluster's certificate, and those between it and the CA if there are any.
        key: PEM file with its private key, for the owner's eyes only.
        passphrase: of the key, if it is encrypted.
    """

    cluster: str
    ca: str
    cert: str
    key: str
    passphrase: str | None = field(default=None, repr=False)

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """TLS 1.3 with certificates on both sides; whose they are is checked by `Session`.

        Raises:
            SecurityError: a file is missing, does not parse or is open to others, or the passphrase is wrong.
        """
        check_private(self.key, "tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # clusters have names of their own; without a host name, none is sent in clear
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if server_side:
            context.num_tickets = 0  # sessions are not resumed
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise SecurityError(
                f"tls_ca must be a PEM file of CA certificates, got {self.ca!r}: {_reason(error)}"
            ) from error
        try:
            context.load_cert_chain(self.cert, self.key, self._passphrase)
        except (OSError, ssl.SSLError) as error:
            raise SecurityError(
                f"tls_cert and tls_key must be PEM files of a certificate and its private key, got {self.cert!r} and "
                f"{self.key!r}: {_reason(error)}"
            ) from error
        return context

    def _passphrase(self) -> str:
        if self.passphrase is None:  # and never let OpenSSL ask on a terminal
            raise SecurityError(
                f"tls_key {self.key!r} is encrypted: set tls_key_passphrase_file to a file with its passphrase (mode 0600)"
            )
        return self.passphrase

    def pack(self) -> bytes:
        """For the courier, through memory that only it gets: not through arguments or variables, which others can read."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Credentials:
        """What `pack` made."""
        return cls(**json.loads(data))


class Identity:
    """Makes sessions from a cluster's files, which may be replaced meanwhile: the newest that load are taken.

    Args:
        credentials: the files.
        note: told, in a sentence, if changed files do not load.

    Raises:
        SecurityError: the files are not in order now.
    """

    def __init__(self, credentials: Credentials, note: Callable[[str], None] = lambda sentence: None) -> None:
        self.credentials = credentials
        self._note = note
        self._seen = self._look()
        self._contexts = self._load()

    def session(self, *, server_side: bool, allowed: Collection[str] | None, peer: str) -> Session:
        """A new session with a cluster.

        Args:
            server_side: which of the two roles of TLS is ours.
            allowed, peer: see `Session`.
        """
        if (now := self._look()) != self._seen:
            self._seen = now
            try:
                self._contexts = self._load()
            except SecurityError as error:
                self._note(f"the changed TLS files of cluster {self.cluster!r} were not taken: {error}")
        return Session(
            self._contexts[server_side], server_side=server_side, cluster=self.cluster, allowed=allowed, peer=peer
        )

    @property
    def cluster(self) -> str:
        """This cluster's name."""
        return self.credentials.cluster

    def _load(self) -> dict[bool, ssl.SSLContext]:
        return {side: self.credentials.context(server_side=side) for side in (False, True)}

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in (self.credentials.ca, self.credentials.cert, self.credentials.key):
            entry = None
            with contextlib.suppress(OSError):
                status = os.stat(path)
                entry = (status.st_mtime_ns, status.st_ino, status.st_size)
            found.append(entry)
        return found


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it does not parse").replace("_", " ").lower()
    return error.strerror or str(error)
