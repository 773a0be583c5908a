"""Folders that are handed on, such as adapters and checkpoints: signed by whoever made them, verified before they are loaded.

The signature is Ed25519 (RFC 8032) over a manifest of all files; the signer's certificate, issued by the same CA as those of
clusters, is in the manifest and says who it was.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.certificates import (
    SigningKey,
    common_name,
    is_authority,
    is_issued_by,
    pem,
    signer_name,
)
from paddlenlp_nebula.security.files import write_public
from paddlenlp_nebula.security.manifest import MANIFEST, Manifest, differences, look_at, read_manifest

__all__ = ["Signed", "sign_folder", "verify_folder"]

_MAX_CERTIFICATE = 1 << 14  # characters
_NAMED = 50  # differences that a sentence lists


@dataclass(frozen=True)
class Signed:
    """What a signature says.

    Attributes:
        signer: the name in the certificate.
        issuer: the name of the CA that gave it.
        signed_at: by the signer's own clock, UTC.
        valid_until: the last day of the certificate.
        files: how many.
        nbytes: all files together.
    """

    signer: str
    issuer: str
    signed_at: str
    valid_until: datetime.datetime
    files: int
    nbytes: int


def sign_folder(folder: Path, key: SigningKey, certificate: x509.Certificate) -> Signed:
    """Write a manifest of everything in a folder, signed, into the folder; an older one is replaced.

    Args:
        folder: the folder.
        key: the signer's.
        certificate: for that key, valid today.

    Raises:
        SecurityError: the certificate is not a signer's, not for this key or not valid today, or the folder holds something
            that cannot be signed, such as a symbolic link.
    """
    signer = _signer(certificate, "the certificate for --key")
    if certificate.public_key() != key.public_key():
        raise SecurityError(f"the certificate of {signer} and the key must belong together, but do not")
    _check_dates(certificate, f"the certificate of {signer}")
    files = look_at(folder)
    if not files:
        raise SecurityError(f"a folder that is to be signed must hold a file, but {str(folder)!r} has none")
    now = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    manifest = Manifest(files, now, pem(certificate).decode())
    manifest = replace(manifest, signature=key.sign(manifest.signed_bytes()).hex())
    write_public(folder / MANIFEST, manifest.pack())
    return _signed(manifest, certificate, signer)


def verify_folder(folder: Path, trusted: Sequence[x509.Certificate]) -> Signed:
    """Make sure that a folder holds exactly what was signed, by whom we trust; nothing of it is loaded.

    Args:
        folder: the folder; nobody else should be able to write to it.
        trusted: certificates of CAs, all of whose signers are trusted, or of single signers.

    Returns:
        Who it was.

    Raises:
        SecurityError: nobody we trust has signed it, or a file is missing, added or changed.
    """
    manifest = read_manifest(folder)
    certificate = _certificate(manifest, folder)
    _check_issuer(certificate, trusted)
    signer = _signer(certificate, f"the certificate in {str(folder / MANIFEST)!r}")
    _check_dates(certificate, f"the certificate of {signer}")
    key = certificate.public_key()
    assert isinstance(key, ed25519.Ed25519PublicKey)  # or it would have no signer
    try:
        key.verify(bytes.fromhex(manifest.signature), manifest.signed_bytes())
    except (ValueError, InvalidSignature):
        raise SecurityError(
            f"{str(folder / MANIFEST)!r} must be signed with the key of {signer}, whose certificate it holds, but is not: it "
            "was changed, or somebody else has put the certificate there",
            "a wrong signature",
        ) from None
    if found := differences(folder, manifest.files):
        more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
        raise SecurityError(
            f"{str(folder)!r} must hold exactly what {signer} has signed, but\n"
            + "\n".join(f"  - {sentence}" for sentence in [*found[:_NAMED], *more]),
            "a folder that is not what was signed",
        )
    return _signed(manifest, certificate, signer)


def _certificate(manifest: Manifest, folder: Path) -> x509.Certificate:
    try:
        if len(manifest.certificate) > _MAX_CERTIFICATE:
            raise ValueError(f"it has more than {_MAX_CERTIFICATE} characters")
        found = x509.load_pem_x509_certificate(manifest.certificate.encode())
        # They are parsed when they are first looked at.
        _ = found.subject, found.issuer, found.not_valid_before_utc, found.not_valid_after_utc
        _ = found.public_key(), found.extensions
        return found
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise SecurityError(
            f"{str(folder / MANIFEST)!r} must hold the signer's certificate in PEM, but it does not parse: {error}",
            "a manifest that is not in order",
        ) from None


def _check_issuer(certificate: x509.Certificate, trusted: Sequence[x509.Certificate]) -> None:
    """Before anything else of the certificate is believed."""
    for other in trusted:
        if certificate == other:
            return
        if is_authority(other) and is_issued_by(certificate, other):
            _check_dates(other, f"the certificate of the CA {common_name(other.subject)!r:.80}")
            return
    names = ", ".join(f"{common_name(other.subject)!r:.80}" for other in trusted[:8]) or "nobody"
    raise SecurityError(
        f"the folder must be signed with a certificate that is trusted, or issued by a CA that is ({names}), got one that "
        f"calls itself {common_name(certificate.subject)!r:.80}, of {common_name(certificate.issuer)!r:.80}",
        "a certificate of another CA",
    )


def _signer(certificate: x509.Certificate, what: str) -> str:
    name = signer_name(certificate)
    if name is None:
        raise SecurityError(
            f"{what} must be a signer's, with an Ed25519 key (`nebula keygen signer NAME` makes one), got one for "
            f"{common_name(certificate.subject)!r:.80}",
            "a certificate for something else",
        )
    return name


def _check_dates(certificate: x509.Certificate, whose: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    if certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        return
    early = now < certificate.not_valid_before_utc
    raise SecurityError(
        f"{whose} must be valid today, but {'is not valid yet' if early else 'has expired'}: it is for "
        f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to {certificate.not_valid_after_utc:%Y-%m-%d %H:%M}, and it is "
        f"{now:%Y-%m-%d %H:%M} UTC; sign again with a new one (`nebula keygen signer`), or set the clock",
        "a certificate that is not valid yet" if early else "an expired certificate",
    )


def _signed(manifest: Manifest, certificate: x509.Certificate, signer: str) -> Signed:
    return Signed(
        signer,
        common_name(certificate.issuer),
        manifest.signed_at,
        certificate.not_valid_after_utc,
        len(manifest.files),
        sum(file.size for file in manifest.files.values()),
    )
