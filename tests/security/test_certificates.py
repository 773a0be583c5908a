"""Certificates: what is made is what OpenSSL accepts, and what does not belong together is refused."""

from __future__ import annotations

import base64
import datetime
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.certificates import (
    Authority,
    cluster_names,
    fingerprint,
    load_key,
    new_key,
    new_request,
    new_signing_key,
    pem,
    pem_of_key,
    read_request,
)


def test_openssl_accepts_them_strictly(tmp_path: Path) -> None:
    authority = Authority.create("a CA")
    (tmp_path / "ca.pem").write_bytes(pem(authority.certificate))
    (tmp_path / "west.pem").write_bytes(pem(authority.issue("west", new_key().public_key())))
    for purpose in ("sslserver", "sslclient"):
        words = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca.pem", "west.pem"]
        run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_what_is_in_a_clusters_certificate() -> None:
    authority, now = Authority.create("a CA"), datetime.datetime.now(datetime.timezone.utc)
    found = authority.issue("site-1_b", new_key().public_key(), days=10)
    assert cluster_names(found) == {"site-1_b"}
    assert found.issuer == authority.certificate.subject
    assert abs(found.not_valid_after_utc - now - datetime.timedelta(days=10)) < datetime.timedelta(minutes=10)
    assert found.not_valid_before_utc < now
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_no_certificate_outlives_its_ca() -> None:
    authority = Authority.create("a CA", days=5)
    found = authority.issue("west", new_key().public_key(), days=365)
    assert found.not_valid_after_utc == authority.certificate.not_valid_after_utc


@pytest.mark.parametrize("name", ["", "west.example.org", "zürich", "a b", "x" * 64, "*", "west\0east"])
def test_names_that_a_certificate_cannot_hold(name: str) -> None:
    with pytest.raises(SecurityError, match="must be 1 to 63 ASCII letters"):
        Authority.create("a CA").issue(name, new_key().public_key())
    with pytest.raises(SecurityError, match="must be 1 to 63 ASCII letters"):
        new_request(name, new_key())


def test_keys_come_back(tmp_path: Path) -> None:
    key = new_key()
    assert load_key(pem_of_key(key)).public_key() == key.public_key()
    sealed = pem_of_key(key, "open sesame")
    assert b"ENCRYPTED" in sealed
    assert load_key(sealed, "open sesame").public_key() == key.public_key()
    with pytest.raises(SecurityError, match="passphrase the right one"):
        load_key(sealed, "wrong")
    with pytest.raises(SecurityError, match="is encrypted: give its passphrase"):
        load_key(sealed)
    with pytest.raises(SecurityError, match="is not encrypted"):
        load_key(pem_of_key(key), "needless")
    with pytest.raises(SecurityError, match="must be a private key in PEM"):
        load_key(b"nothing")
    with pytest.raises(SecurityError, match=r"tls_key must be an elliptic-curve key, got .*Ed25519PrivateKey"):
        load_key(pem_of_key(new_signing_key()))


def test_an_authority_comes_back() -> None:
    authority = Authority.create("a CA")
    again = Authority.load(pem(authority.certificate), pem_of_key(authority.key, "p"), "p")
    assert again.certificate == authority.certificate
    with pytest.raises(SecurityError, match="must belong together"):
        Authority.load(pem(authority.certificate), pem_of_key(new_key()))


def test_requests() -> None:
    key = new_key()
    data = pem(new_request("east", key))
    assert read_request(data) == ("east", key.public_key(), fingerprint(key.public_key()))
    assert len(fingerprint(key.public_key())) == 3 * 32 - 1
    for wrong in (b"", b"nothing", pem(Authority.create("a CA").certificate)):
        with pytest.raises(SecurityError, match="certificate request in PEM was expected"):
            read_request(wrong)


def test_a_request_for_several_clusters_or_for_a_host() -> None:
    key = new_key()
    for names in (["east", "west"], ["east.example.org"], []):
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False
            )
        with pytest.raises(SecurityError, match=r"must name one cluster|must be 1 to 63 ASCII"):
            read_request(pem(builder.sign(key, hashes.SHA256())))


@pytest.mark.parametrize("other", [b"\x03\x01\x63", b"\x03\x01\x62"])
def test_a_request_with_an_unknown_curve_is_refused(other: bytes) -> None:
    """The number of P-256 (1.2.840.10045.3.1.7) altered."""
    request = new_request("east", new_key()).public_bytes(serialization.Encoding.DER)
    altered = request.replace(b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d" + other)
    assert altered != request
    body = base64.encodebytes(altered).decode()
    with pytest.raises(SecurityError, match="a certificate request in PEM was expected, but it does not parse"):
        read_request(f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n".encode())
