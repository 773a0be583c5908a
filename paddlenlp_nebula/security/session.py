"""One TLS 1.3 session between bytes and bytes: no socket, no waiting; whoever has a pipe pumps it.

What OpenSSL has to say about the other side is put into sentences here.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Collection, Mapping
from typing import Any

from paddlenlp_nebula.errors import SecurityError

__all__ = ["RECORD_BYTES", "Session"]

RECORD_BYTES = 1 << 14
"""Payload of one TLS record at most (RFC 8446, section 5.1); each costs 22 bytes more."""

_DAY_S = 86400
_WARN_DAYS = 14

_EXPIRED, _NOT_YET = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_UNKNOWN_CA = (2, 18, 19, 20, 21)  # the several ways in which OpenSSL finds no trusted issuer


class Session:
    """Both directions of a session, from the handshake on.

    Args:
        context: from `Credentials.context`.
        server_side: which of the two roles of TLS is ours.
        cluster: this cluster.
        allowed: the clusters that may be at the other end; None: any with a certificate, the caller looks at ``names``.
        peer: what the other end is called in sentences, such as "cluster 'east'".

    Attributes:
        peer: as above; may be changed when it is known better.
        names: the clusters that the other end's certificate is for, after the handshake.
        records_sent: TLS records sealed so far, from 0.

    Every method raises SecurityError when the other side is refused, refuses us, or sends what no TLS peer would.
    After that the session is good for nothing but ``take``: what it still has to say is the reason.
    """

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, cluster: str, allowed: Collection[str] | None, peer: str
    ) -> None:
        self.peer = peer
        self.names: frozenset[str] = frozenset()
        self.records_sent = 0
        self._cluster = cluster
        self._allowed = None if allowed is None else frozenset(allowed)
        self._context = context
        self._complete = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take in what has arrived. It is kept until ``handshake`` or ``read_into`` use it: feed again after that."""
        self._incoming.write(data)

    @property
    def unread(self) -> int:
        """Bytes that were fed and have not been looked at."""
        return self._incoming.pending

    @property
    def unsent(self) -> int:
        """Bytes for ``take``."""
        return self._outgoing.pending

    def take(self, nbytes: int = -1) -> bytes:
        """What is to be sent, at most ``nbytes`` of it."""
        return self._outgoing.read(nbytes)

    def handshake(self) -> bool:
        """Go on with the handshake; whether it is complete, and the other side one of ``allowed``.

        The other side may still refuse us: it has accepted when something can be read from it.
        """
        if self._complete:
            return True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise self._explain(error) from error
        certificate = self._certificate()
        names = frozenset(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
        if self._allowed is not None and not names & self._allowed:
            raise SecurityError(
                f"{self.peer} must show a certificate for {_either(self._allowed)}, got one for "
                f"{_either(names) if names else 'no cluster'} ({_issue(certificate)}): issue one with `nebula keygen cluster`, "
                "or check `clusters` on both sides",
                "a certificate for another name",
            )
        self.names, self._complete = names, True
        return True

    @property
    def expiry_note(self) -> str | None:
        """A sentence if the other side's certificate expires soon."""
        until = str(self._certificate().get("notAfter", ""))
        left_s = ssl.cert_time_to_seconds(until) - time.time() if until else float("inf")
        if left_s > _WARN_DAYS * _DAY_S:
            return None
        return expiry_sentence(f"the certificate of {self.peer}", until, left_s)

    def _certificate(self) -> Mapping[str, Any]:
        return self._tls.getpeercert() or {}

    @property
    def cipher(self) -> str:
        """Such as TLS_AES_256_GCM_SHA384."""
        found = self._tls.cipher()
        return found[0] if found else "none"

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Seal some bytes; 64 to 256 KiB at a time are fastest."""
        if len(data):
            self._tls.write(data)
            self.records_sent += -(-len(data) // RECORD_BYTES)

    def read_into(self, view: memoryview) -> int:
        """Open some of what was fed, at most a record; 0 while there is no whole one."""
        try:
            got = int(self._tls.read(len(view), view))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise self._explain(error) from error
        if got == 0:  # TLS's own goodbye
            raise SecurityError(f"{self.peer} has ended the TLS session", "an ended session")
        return got

    def _explain(self, error: ssl.SSLError) -> SecurityError:
        reason = error.reason or ""
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._refusal(error)
        if "ALERT" in reason:
            return self._alerted(_words(reason.partition("ALERT_")[2]))
        if "BAD_RECORD_MAC" in reason or "DECRYPTION_FAILED" in reason or self._complete:
            return SecurityError(
                f"what arrives from {self.peer} is not what it sent ({_words(reason)}): somebody or something on the way "
                "changes, drops, repeats or reorders data",
                "altered data",
            )
        if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
            return SecurityError(f"{self.peer} must show a certificate, got none: set its tls_cert", "no certificate")
        return SecurityError(
            f"{self.peer} must speak TLS 1.3, got something else ({_words(reason)}): set the same sync_security on all "
            "clusters, and check that nothing else uses this address or changes the data",
            "something that is not TLS 1.3",
        )

    def _refusal(self, error: ssl.SSLCertVerificationError) -> SecurityError:
        """We do not accept the other side's certificate."""
        if error.verify_code in (_EXPIRED, _NOT_YET):
            state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            return SecurityError(
                f"{self.peer} must show a certificate that is valid today, but one in its chain {state} by this machine's "
                f"clock ({now}): issue a new one with `nebula keygen cluster`, or set the clocks",
                "an expired certificate" if error.verify_code == _EXPIRED else "a certificate that is not valid yet",
            )
        if error.verify_code in _UNKNOWN_CA:
            return SecurityError(
                f"{self.peer} must show a certificate signed by a CA in tls_ca ({_subjects(self._context)}), got one by another "
                f"({error.verify_message}): give all clusters the same tls_ca, and certificates signed by it",
                "a certificate of another CA",
            )
        return SecurityError(
            f"{self.peer} must show a certificate of a cluster, signed by a CA in tls_ca ({_subjects(self._context)}), got one that "
            f"cannot be accepted ({error.verify_message})",
            "a certificate that cannot be accepted",
        )

    def _alerted(self, alert: str) -> SecurityError:
        """The other side has ended the session; TLS lets it give a reason in a word or two."""
        if alert in ("bad record mac", "decode error", "unexpected message", "record overflow"):
            return SecurityError(
                f"what arrives at {self.peer} is not what this cluster sent ({alert}): somebody or something on the way "
                "changes, drops, repeats or reorders data",
                "altered data",
            )
        return SecurityError(
            f"{self.peer} refused the certificate of cluster {self._cluster!r} ({alert}): it must be signed by a CA in the "
            "other side's tls_ca and be valid by the other side's clock (`nebula trust show` tells)",
            "a refusal by the other side",
        )


def expiry_sentence(whose: str, until: str, left_s: float) -> str:
    """What is said of a certificate that ends soon."""
    when = f"expires in {left_s / _DAY_S:.1f} days" if left_s > 0 else "has expired"
    return (
        f"{whose} {when} ({until}): put a new one into its place (`nebula keygen cluster`); it is taken at the next "
        "session, without stopping the run"
    )


def _subjects(context: ssl.SSLContext) -> str:
    names = [_common_name(ca.get("subject", ())) for ca in context.get_ca_certs()]
    return ", ".join(names) or "none"


def _issue(certificate: Mapping[str, Any]) -> str:
    return (
        f"issued by {_common_name(certificate.get('issuer', ()))}, valid from {certificate.get('notBefore')} to "
        f"{certificate.get('notAfter')}"
    )


def _common_name(name: Any) -> str:
    for group in name:
        for key, value in group:
            if key == "commonName":
                return f"{value!r:.80}"
    return "an unnamed CA"


def _either(names: Collection[str]) -> str:
    return " or ".join(f"{name!r:.80}" for name in sorted(names)[:8])


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower() or "no reason given"
