"""Sessions: two ends in memory, and what each side says of a wrong one. More is in tests/transport/test_sealed.py."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.identity import Identity
from paddlenlp_nebula.security.session import Session

from .certificates import Site, at

NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def pair(west: Identity, east: Identity, at_west: Sequence[str] = ("east",)) -> tuple[Session, Session]:
    """West has the server's part."""
    return (
        west.session(server_side=True, allowed=at_west, peer="a stranger"),
        east.session(server_side=False, allowed=["west"], peer="cluster 'west'"),
    )


def meet(server: Session, client: Session) -> list[SecurityError | None]:
    """Go on until both have shaken hands, or have said why not: the server's word and the client's."""
    found: list[SecurityError | None] = [None, None]
    for _ in range(6):
        for number, (end, other) in enumerate(((server, client), (client, server))):
            if found[number] is None:
                try:
                    if end.handshake():
                        end.read_into(memoryview(bytearray(100)))
                except SecurityError as error:
                    found[number] = error
            other.feed(end.take())
    return found


def test_both_know_each_other_and_nothing_older_than_tls_1_3(site: Site) -> None:
    server, client = pair(site.identity("west"), site.identity("east"), ["east", "north"])
    assert meet(server, client) == [None, None]
    assert (server.names, client.names) == ({"east"}, {"west"})
    assert server.cipher.startswith("TLS_")
    client.write(b"x" * 40_000)
    assert client.records_sent == 3
    server.feed(client.take())
    view = memoryview(bytearray(50_000))
    assert [server.read_into(view) for _ in range(4)] == [16384, 16384, 40_000 - 32768, 0]
    assert bytes(view[: 40_000 - 32768]) == b"x" * (40_000 - 32768)


def test_an_expired_certificate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    past = NOW - datetime.timedelta(days=20)
    east = at(past, lambda: site.identity("east", file="expired", days=10), monkeypatch)
    server, client = meet(*pair(site.identity("west"), east))
    assert server is not None
    assert client is not None
    assert server.category == "an expired certificate"
    assert "must show a certificate that is valid today, but one in its chain has expired" in str(server)
    assert "cluster 'west' refused the certificate of cluster 'east' (certificate expired)" in str(client)


def test_an_expired_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = at(NOW - datetime.timedelta(days=4000), lambda: Site(tmp_path), monkeypatch)
    identity = at(NOW - datetime.timedelta(days=4000), lambda: site.identity("east"), monkeypatch)
    _, client = meet(*pair(identity, identity))
    assert client is not None
    assert client.category == "an expired certificate"


def test_a_certificate_that_is_no_clusters(site: Site, tmp_path: Path) -> None:
    """The CA's own certificate has the right issuer but no cluster's name; its holder is no cluster."""
    from paddlenlp_nebula.security.certificates import pem, pem_of_key
    from paddlenlp_nebula.security.files import write_private, write_public

    files = replace(site.credentials("east"), cert=str(tmp_path / "ca.pem"), key=str(tmp_path / "ca.key"))
    write_public(Path(files.cert), pem(site.authority.certificate))
    write_private(Path(files.key), pem_of_key(site.authority.key))
    server, client = meet(*pair(site.identity("west"), Identity(files)))
    assert server is not None
    assert "a stranger must show a certificate" in str(server)
    assert client is not None


def test_a_certificate_signed_by_another_clusters(site: Site, tmp_path: Path) -> None:
    """A cluster cannot make certificates with its own key."""
    from paddlenlp_nebula.security.certificates import Authority, load_key, new_key, pem, pem_of_key
    from paddlenlp_nebula.security.files import write_private, write_public

    mallory = site.credentials("mallory")
    from cryptography import x509

    own = x509.load_pem_x509_certificate(Path(mallory.cert).read_bytes())
    forger = Authority(own, load_key(Path(mallory.key).read_bytes()))
    key = new_key()
    files = replace(mallory, cluster="east", cert=str(tmp_path / "forged.pem"), key=str(tmp_path / "forged.key"))
    write_public(Path(files.cert), pem(forger.issue("east", key.public_key())) + pem(own))
    write_private(Path(files.key), pem_of_key(key))
    server, _ = meet(*pair(site.identity("west"), Identity(files)))
    assert server is not None
    assert server.category == "a certificate that cannot be accepted"


def test_no_certificate(site: Site) -> None:
    west = site.identity("west")
    server = west.session(server_side=True, allowed=["east"], peer="a stranger")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = Session(context, server_side=False, cluster="east", allowed=["west"], peer="cluster 'west'")
    found, refused = meet(server, client)
    assert found is not None
    assert found.category == "no certificate"
    assert refused is not None


def test_an_older_tls_is_refused(site: Site) -> None:
    server, client = pair(site.identity("west"), site.identity("east"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(site.ca)
    client = Session(context, server_side=False, cluster="east", allowed=["west"], peer="cluster 'west'")
    found, _ = meet(server, client)
    assert found is not None
    assert "must speak TLS 1.3, got something else (unsupported protocol)" in str(found)


@pytest.mark.parametrize("data", [b"NEB1" + bytes(40), b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"SSH-2.0-OpenSSH_9\r\n"])
def test_something_else(site: Site, data: bytes) -> None:
    server, _ = pair(site.identity("west"), site.identity("east"))
    server.feed(data)
    with pytest.raises(
        SecurityError, match=r"a stranger must speak TLS 1.3, got something else \(.*set the same sync_sec"
    ):
        server.handshake()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=400), st.sampled_from([b"", b"\x16\x03\x01", b"\x16\x03\x03\x00\x40\x01\x00\x00\x3c\x03\x03"])
)
def test_noise_is_refused_or_waited_for(site: Site, data: bytes, start: bytes) -> None:
    server, _ = pair(site.identity("west"), site.identity("east"))
    server.feed(start + data)
    try:
        assert not server.handshake()
    except SecurityError as error:
        assert error.category  # noqa: PT017  # either is fine, anything else is not


def test_an_ended_session(site: Site) -> None:
    server, client = pair(site.identity("west"), site.identity("east"))
    meet(server, client)
    with pytest.raises(ssl.SSLWantReadError):
        client._tls.unwrap()
    server.feed(client.take())
    with pytest.raises(SecurityError, match="has ended the TLS session"):
        server.read_into(memoryview(bytearray(10)))


def test_no_name_crosses_the_network_in_the_clear(site: Site) -> None:
    """Whoever listens does not even learn who talks: TLS 1.3 seals certificates, and no host name is sent."""
    server, client = pair(site.identity("west"), site.identity("east"))
    seen = b""
    for _ in range(4):
        for end, other in ((client, server), (server, client)):
            end.handshake()
            data = end.take()
            seen += data
            other.feed(data)
    assert len(seen) > 1000
    assert b"west" not in seen
    assert b"east" not in seen
    assert b"test CA" not in seen
    assert socket.gethostname().encode() not in seen
