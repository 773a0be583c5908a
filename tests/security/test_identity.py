"""A cluster's own files: refused in a sentence when they are not in order, taken anew when they change."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.certificates import new_key, pem, pem_of_key
from paddlenlp_nebula.security.check import check_own
from paddlenlp_nebula.security.files import write_private
from paddlenlp_nebula.security.identity import Credentials, Identity

from .certificates import Site, at

NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def test_good_files(site: Site) -> None:
    assert check_own(site.identity("west")) is None


def test_credentials_travel_as_bytes_and_never_show_their_passphrase() -> None:
    credentials = Credentials("west", "ca", "cert", "key", "open sesame")
    assert Credentials.parse(credentials.pack()) == credentials
    assert "sesame" not in repr(credentials)


def test_an_encrypted_key(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    credentials = site.credentials("west")
    key = new_key()
    write_private(Path(credentials.key), pem_of_key(key, "open sesame"))
    Path(credentials.cert).write_bytes(pem(site.authority.issue("west", key.public_key())))
    assert check_own(Identity(replace(credentials, passphrase="open sesame"))) is None
    with pytest.raises(SecurityError, match="is encrypted: set tls_key_passphrase_file"):
        Identity(credentials)
    with pytest.raises(SecurityError, match="tls_cert and tls_key must be PEM files"):
        Identity(replace(credentials, passphrase="wrong"))
    assert capfd.readouterr().out == capfd.readouterr().err == ""  # OpenSSL asks nobody


def test_files_that_are_not_in_order(site: Site, tmp_path: Path) -> None:
    good = site.credentials("west")
    junk = tmp_path / "junk.pem"
    write_private(junk, b"junk")
    for wrong, sentence in (
        (replace(good, ca=str(junk)), "tls_ca must be a PEM file of CA certificates, got"),
        (replace(good, ca="/none"), "tls_ca must be a PEM file of CA certificates, got '/none': No such file"),
        (replace(good, cert=str(junk)), "tls_cert and tls_key must be PEM files"),
        (replace(good, key=str(junk)), "tls_cert and tls_key must be PEM files"),
        (replace(good, key="/none"), "tls_key must be a file that can be read, got '/none'"),
        (replace(good, key=site.credentials("east").key), "key values mismatch"),
    ):
        with pytest.raises(SecurityError, match=sentence):
            Identity(wrong)
    Path(good.key).chmod(0o640)
    with pytest.raises(SecurityError, match="has mode 0640: chmod 600"):
        Identity(good)


def test_certificates_that_the_others_would_refuse(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Site(tmp_path / "other", "another CA")
    cases = [
        (
            Identity(replace(site.credentials("east"), cluster="west")),
            "must show a certificate for 'west', got one for 'east'",
        ),
        (
            other.identity("west", ca=site.ca),
            "must show a certificate signed by a CA in tls_ca ('test CA'), got one by another",
        ),
    ]
    past, future = NOW - datetime.timedelta(days=20), NOW + datetime.timedelta(days=2)
    expired = at(past, lambda: site.identity("west", file="expired", days=10), monkeypatch)
    early = at(future, lambda: site.identity("west", file="early", days=10), monkeypatch)
    cases += [
        (expired, "one in its chain has expired by this machine's clock (20"),
        (early, "is not valid yet by this"),
    ]
    for identity, sentence in cases:
        with pytest.raises(SecurityError) as caught:
            check_own(identity)
        assert sentence in str(caught.value)
        assert f"tls_cert: '{identity.credentials.cert}', for " in str(caught.value)
        assert "UTC)" in str(caught.value)  # the dates


@pytest.mark.parametrize(("days", "soon"), [(13, True), (15, False)])
def test_a_certificate_that_expires_soon(site: Site, days: int, soon: bool) -> None:
    found = check_own(site.identity("west", days=days))
    assert (found is not None) is soon
    assert found is None or "cluster 'west' itself expires in 13.0 days" in found
