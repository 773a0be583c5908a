"""Opening a cluster's files: the passphrase, and a look at the own certificate before anybody else takes one."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from dataclasses import replace

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.files import check_private, read_passphrase
from paddlenlp_nebula.security.identity import Credentials, Identity

__all__ = ["check_own", "find_passphrase", "open_identity"]


def open_identity(credentials: Credentials, passphrase_file: str | None, note: Callable[[str], None]) -> Identity:
    """Make sure that a cluster's files are in order, and take them.

    Args:
        credentials: the files; the passphrase need not be known yet.
        passphrase_file: where it is, or None.
        note: told, in a sentence, of what will soon be out of order.

    Raises:
        SecurityError: something is not in order; says what.
    """
    passphrase = find_passphrase(credentials.key, passphrase_file)
    identity = Identity(replace(credentials, passphrase=passphrase), note)
    if sentence := check_own(identity):
        note(sentence)
    return identity


def find_passphrase(
    key: str,
    passphrase_file: str | None,
    what: str = "tls_key",
    option: str = "tls_key_passphrase_file",
    ask: Callable[[str], str] | None = None,
) -> str | None:
    """The passphrase of a key file: from its own file, or from whoever sits at the terminal; None if there is none.

    Args:
        key: the key file.
        passphrase_file: where its passphrase is, or None.
        what, option: what the two are called in sentences.
        ask: asks for it; by default on the terminal that this process belongs to.

    Raises:
        SecurityError: it is needed and cannot be had, or a file is not in order.
    """
    check_private(key, what)
    if passphrase_file:
        return read_passphrase(passphrase_file, option)
    with open(key, "rb") as file:
        if b"ENCRYPTED" not in file.read():
            return None
    return (ask or _ask)(f"Passphrase of {key}")


def _ask(prompt: str) -> str:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        raise SecurityError(
            "tls_key is encrypted and there is no terminal to ask for its passphrase: set tls_key_passphrase_file to a file "
            "with it (mode 0600)"
        ) from None
    return getpass.getpass(f"{prompt}: ")


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
