"""Making certificates: a certificate authority (CA), one certificate per cluster, and one per signer of folders.

Certificates are X.509 v3 (RFC 5280): made and read by ``cryptography``, checked on the links by OpenSSL. Keys of CAs and
clusters are ECDSA on P-256, those of signers Ed25519 (RFC 8032); by the sort of its key a certificate is for one or the
other, and no signer's is accepted on a link, nor a cluster's under a signature.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paddlenlp_nebula.errors import SecurityError

__all__ = [
    "CA_DAYS",
    "CLUSTER_DAYS",
    "Authority",
    "SigningKey",
    "cluster_names",
    "common_name",
    "fingerprint",
    "is_authority",
    "is_issued_by",
    "load_key",
    "load_signing_key",
    "new_key",
    "new_request",
    "new_signing_key",
    "pem",
    "pem_of_key",
    "read_request",
    "signer_name",
]

CA_DAYS = 3650
CLUSTER_DAYS = 365

_SKEW = datetime.timedelta(minutes=5)  # between the clocks of two sites
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")

Key = ec.EllipticCurvePrivateKey
SigningKey = ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True)
class Authority:
    """A CA: its certificate, which every cluster has, and its key, which only one place has."""

    certificate: x509.Certificate
    key: Key

    @classmethod
    def create(cls, name: str, days: int = CA_DAYS) -> Authority:
        """A new, self-signed one that may sign certificates of clusters and signers and nothing else.

        Args:
            name: how it is called in error messages.
            days: how long it is valid.
        """
        key = new_key()
        subject = _subject(name)
        builder = (
            _builder(subject, subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes, passphrase: str | None = None) -> Authority:
        """From PEM.

        Raises:
            SecurityError: they do not parse, or do not belong together.
        """
        found = x509.load_pem_x509_certificate(certificate)
        private = load_key(key, passphrase, "the CA's key")
        if found.public_key() != private.public_key():
            raise SecurityError(
                f"the CA's certificate ({common_name(found.subject)}) and key must belong together, but do not"
            )
        return cls(found, private)

    def issue(self, name: str, public_key: PublicKey, days: int = CLUSTER_DAYS) -> x509.Certificate:
        """A certificate for a cluster, good at both ends of a connection, or, if the key is Ed25519, for a signer.

        Args:
            name: the cluster's, which becomes the certificate's only DNS name; a signer's certificate has none.
            public_key: the cluster's or the signer's.
            days: how long it is valid; the CA's own end is the latest.

        Raises:
            SecurityError: the name cannot be in a certificate.
        """
        check_name(name)
        signer = isinstance(public_key, ed25519.Ed25519PublicKey)
        purposes = (
            [ExtendedKeyUsageOID.CODE_SIGNING]
            if signer
            else [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        issuer = self.certificate
        authority = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(_subject(name), issuer.subject, public_key, days, latest=issuer.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
        )
        if not signer:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self.key, hashes.SHA256())


def check_name(name: str) -> None:
    """Refuse a name that a certificate cannot hold.

    Raises:
        SecurityError: it is not made of 1 to 63 ASCII letters, digits, '-' and '_'.
    """
    if not _NAME.fullmatch(name):
        raise SecurityError(
            f"a name in a certificate must be 1 to 63 ASCII letters, digits, '-' and '_', got {name!r:.80}"
        )


def new_key() -> Key:
    """A new private key of a CA or a cluster."""
    return ec.generate_private_key(ec.SECP256R1())


def new_signing_key() -> SigningKey:
    """A new private key of a signer."""
    return ed25519.Ed25519PrivateKey.generate()


def load_key(data: bytes, passphrase: str | None = None, what: str = "tls_key") -> Key:
    """A private key of a CA or a cluster, from PEM.

    Raises:
        SecurityError: it does not parse, the passphrase is wrong or missing, or it is of another sort.
    """
    key = _load_key(data, passphrase, what)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SecurityError(
            f"{what} must be an elliptic-curve key, got {type(key).__name__}: `nebula keygen` makes one"
        )
    return key


def load_signing_key(data: bytes, passphrase: str | None = None, what: str = "--key") -> SigningKey:
    """A private key of a signer, from PEM.

    Raises:
        SecurityError: it does not parse, the passphrase is wrong or missing, or it is of another sort.
    """
    key = _load_key(data, passphrase, what)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SecurityError(
            f"{what} must be an Ed25519 key, got {type(key).__name__}: `nebula keygen signer NAME` makes one"
        )
    return key


def _load_key(data: bytes, passphrase: str | None, what: str) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(data, None if passphrase is None else passphrase.encode())
    except TypeError as error:  # cryptography's word for a passphrase that is missing or not needed
        needs = (
            "is encrypted: give its passphrase"
            if passphrase is None
            else "is not encrypted, but a passphrase was given"
        )
        raise SecurityError(f"{what} {needs}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SecurityError(
            f"{what} must be a private key in PEM, and its passphrase the right one: {error}"
        ) from error


def pem_of_key(key: Key | SigningKey, passphrase: str | None = None) -> bytes:
    """A private key as PEM (PKCS #8), encrypted if there is a passphrase."""
    protection = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase.encode())
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)


def pem(thing: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    """A certificate or a request as PEM."""
    return thing.public_bytes(serialization.Encoding.PEM)


def new_request(name: str, key: Key | SigningKey) -> x509.CertificateSigningRequest:
    """What a site or a signer sends to the CA, so that the key need not travel.

    Raises:
        SecurityError: the name cannot be in a certificate.
    """
    check_name(name)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())


class Request(NamedTuple):
    """What is in a certificate request: a name, a public key, and the key's fingerprint."""

    name: str
    key: PublicKey
    fingerprint: str

    @property
    def holder(self) -> str:
        """Such as "cluster west"."""
        return f"{'signer' if isinstance(self.key, ed25519.Ed25519PublicKey) else 'cluster'} {self.name}"


def read_request(data: bytes) -> Request:
    """Read a certificate request in PEM.

    Raises:
        SecurityError: it does not parse, is not signed with its own key, or is not for exactly one cluster or signer.
    """
    try:
        request = x509.load_pem_x509_csr(data)
        names, key = cluster_names(request), request.public_key()
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SecurityError(f"a certificate request in PEM was expected, but it does not parse: {error}") from error
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise SecurityError(
            "a certificate request must be signed with the elliptic-curve or Ed25519 key that it holds, and is not"
        )
    if len(names) != 1:
        raise SecurityError(
            f"a certificate request must name one cluster or signer, got {', '.join(sorted(names)) or 'none'}"
        )
    (name,) = names
    check_name(name)
    return Request(name, key, fingerprint(key))


def cluster_names(thing: x509.Certificate | x509.CertificateSigningRequest) -> frozenset[str]:
    """The names in a certificate or a request: its DNS names, as they are compared on the links."""
    try:
        names = thing.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(names.get_values_for_type(x509.DNSName))


def signer_name(certificate: x509.Certificate) -> str | None:
    """Whose certificate it is, if it is one of those that `Authority.issue` makes for signers."""
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return None
    signs = isinstance(certificate.public_key(), ed25519.Ed25519PublicKey) and not is_authority(certificate)
    name = common_name(certificate.subject)
    return name if signs and list(purposes) == [ExtendedKeyUsageOID.CODE_SIGNING] and _NAME.fullmatch(name) else None


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether others may be signed with it."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether its issuer has the authority's name and has signed it with the authority's key."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def fingerprint(key: CertificatePublicKeyTypes) -> str:
    """SHA-256 of a public key, in pairs of hex digits, for comparing by eye or over the telephone."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize().hex(":")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: PublicKey,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def common_name(name: x509.Name) -> str:
    """A person's or a CA's name, as it is called in sentences."""
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()
