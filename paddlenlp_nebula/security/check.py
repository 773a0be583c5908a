"""A look at one's own certificate before anybody else takes one."""

from __future__ import annotations

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.identity import Identity

__all__ = ["check_own"]


def check_own(identity: Identity) -> str | None:
    """Shake hands with ourselves in both roles: all that the others will check is checked.

    Returns:
        A sentence if the certificate expires soon.

    Raises:
        SecurityError: the others would refuse it, by our own CA, clock and name.
    """
    allowed, peer = [identity.cluster], f"cluster {identity.cluster!r} itself"
    client, server = (identity.session(server_side=side, allowed=allowed, peer=peer) for side in (False, True))
    try:
        while not (client.handshake() & server.handshake()):
            server.feed(client.take())
            client.feed(server.take())
    except SecurityError as error:
        raise SecurityError(f"{error} (tls_cert: {describe(identity.credentials.cert)})", error.category) from error
    return client.expiry_note


def describe(path: str) -> str:
    """What is in a certificate file, in a few words."""
    from cryptography import x509  # only where something is wrong: importing it takes a while

    from paddlenlp_nebula.security.certificates import cluster_names

    try:
        with open(path, "rb") as file:
            found = x509.load_pem_x509_certificate(file.read())
        names = ", ".join(sorted(cluster_names(found)))
    except (OSError, ValueError) as error:
        return f"{path!r}, which cannot be read: {error}"
    return (
        f"{path!r}, for {names or 'no cluster'}, issued by {found.issuer.rfc4514_string()}, "
        f"valid {found.not_valid_before_utc:%Y-%m-%d %H:%M} to {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    )
