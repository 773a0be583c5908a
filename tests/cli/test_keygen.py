"""``nebula keygen`` and ``nebula trust``: what they make is what clusters take, and what they show is what it is."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddlenlp_nebula.cli.main import main
from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.check import check_own, open_identity
from paddlenlp_nebula.security.files import write_private
from paddlenlp_nebula.security.identity import Credentials, Identity
from tests.security.certificates import at

NOW = datetime.datetime.now(datetime.timezone.utc)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def nebula(*words: str, typed: str | None = None, fails: bool = False) -> Result:
    result = CliRunner().invoke(main, list(words), input=typed)
    assert (result.exit_code != 0) is fails, result.output
    return result


def files(name: str, folder: str = "nebula-keys", passphrase: str | None = None) -> Credentials:
    return Credentials(name, f"{folder}/ca.pem", f"{folder}/{name}.pem", f"{folder}/{name}.key", passphrase)


def mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_run_of_two() -> None:
    first = nebula("keygen", "ca")
    assert "ca.key  (whoever has it can join any run" in first.output
    west = nebula("keygen", "cluster", "west")
    nebula("keygen", "cluster", "east")
    assert check_own(Identity(files("west"))) is None
    assert check_own(Identity(files("east"))) is None
    assert (mode("nebula-keys"), mode("nebula-keys/ca.key"), mode("nebula-keys/west.key")) == (0o700, 0o600, 0o600)
    for name in ("CA", "CERT", "KEY"):
        assert f"export NEBULA_TLS_{name}={Path.cwd()}/nebula-keys/" in west.output
    assert "PASSPHRASE" not in west.output


def test_a_certificate_is_renewed_in_its_place() -> None:
    nebula("keygen", "ca")
    nebula("keygen", "cluster", "west", "--days", "3")
    notes: list[str] = []
    open_identity(files("west"), None, notes.append)
    assert "expires in 3.0 days" in notes.pop()
    before = Path("nebula-keys/west.key").read_bytes()
    nebula("keygen", "cluster", "west")
    open_identity(files("west"), None, notes.append)
    assert notes == []
    assert Path("nebula-keys/west.key").read_bytes() != before


def test_a_ca_is_never_replaced() -> None:
    nebula("keygen", "ca")
    before = Path("nebula-keys/ca.key").read_bytes()
    assert "a new CA must not replace another" in nebula("keygen", "ca", fails=True).output
    assert Path("nebula-keys/ca.key").read_bytes() == before


def test_a_request_keeps_the_key_at_home() -> None:
    nebula("keygen", "ca", "--folder", "safe")
    there = nebula("keygen", "cluster", "east", "--folder", "site")
    assert sorted(os.listdir("site")) == ["east.csr", "east.key"]
    assert "nebula trust sign east.csr" in there.output
    fingerprint = there.output.split()[-1]
    assert len(fingerprint) == 95
    assert "a request for a certificate for cluster east" in nebula("trust", "show", "site/east.csr").output
    for said in ("n\n", ""):  # nothing: there is no terminal
        refused = nebula("trust", "sign", "site/east.csr", "--folder", "safe", typed=said, fails=True)
        assert "nothing was written: answer y, or add --yes" in refused.output
    assert fingerprint in refused.output
    assert not Path("site/east.pem").exists()
    signed = nebula("trust", "sign", "site/east.csr", "--folder", "safe", typed="y\n")
    assert "cluster east, valid until" in signed.output
    Path("site/ca.pem").write_bytes(Path("safe/ca.pem").read_bytes())
    assert check_own(Identity(files("east", "site"))) is None
    again = nebula("keygen", "cluster", "east", "--folder", "site", fails=True)
    assert "a request must be for a new key" in again.output


def test_encrypted_keys() -> None:
    write_private(Path("ca-word"), b"of the CA\n")
    write_private(Path("word"), b"of west\n")
    nebula("keygen", "ca", "--passphrase-file", "ca-word")
    assert b"ENCRYPTED" in Path("nebula-keys/ca.key").read_bytes()
    nebula("keygen", "cluster", "west", "--passphrase-file", "word", "--ca-passphrase-file", "ca-word")
    open_identity(files("west"), "word", print)
    with pytest.raises(SecurityError, match="tls_cert and tls_key must be PEM files"):
        open_identity(files("west"), "ca-word", print)
    east = nebula("keygen", "cluster", "east", "--encrypt", typed="of the CA\nof east\nof east\n")
    assert "NEBULA_TLS_KEY_PASSPHRASE_FILE" in east.output
    assert check_own(Identity(files("east", passphrase="of east"))) is None
    wrong = nebula("keygen", "cluster", "north", typed="guess\n", fails=True)
    assert "its passphrase the right one" in wrong.output
    assert not Path("nebula-keys/north.key").exists()
    both = nebula(
        "keygen", "cluster", "south", "--encrypt", "--passphrase-file", "word", typed="of the CA\n", fails=True
    )
    assert "either --encrypt" in both.output


def test_a_passphrase_that_nobody_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(Path("word"), b"of west\n")
    nebula("keygen", "ca")
    nebula("keygen", "cluster", "west", "--passphrase-file", "word")

    def no_terminal(path: str, flags: int) -> int:
        raise OSError("no such device")

    monkeypatch.setattr("paddlenlp_nebula.security.check.os.open", no_terminal)
    with pytest.raises(
        SecurityError, match="there is no terminal to ask for its passphrase: set tls_key_passphrase_file"
    ):
        open_identity(files("west"), None, print)


def test_keys_that_others_can_read_are_not_used() -> None:
    nebula("keygen", "ca")
    os.chmod("nebula-keys/ca.key", 0o644)
    refused = nebula("keygen", "cluster", "west", fails=True)
    assert "the CA's key must be for its owner alone (mode 0600)" in refused.output
    os.chmod("nebula-keys/ca.key", 0o600)
    Path("word").write_text("open\n")
    refused = nebula("keygen", "cluster", "west", "--passphrase-file", "word", fails=True)
    assert "--passphrase-file must be for its owner alone" in refused.output


@pytest.mark.parametrize("name", ["west.example.org", "zürich", "a b", "../west"])
def test_names_that_no_cluster_can_have(name: str) -> None:
    nebula("keygen", "ca")
    assert "must be 1 to 63 ASCII letters" in nebula("keygen", "cluster", name, fails=True).output


def test_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    nebula("keygen", "ca", "--name", "our runs")
    nebula("keygen", "cluster", "west")
    shown = nebula("trust", "show", "nebula-keys/ca.pem", "nebula-keys/west.pem", "--ca", "nebula-keys/ca.pem").output
    assert "nebula-keys/ca.pem: the certificate of a CA, our runs" in shown
    assert "nebula-keys/west.pem: the certificate of cluster west" in shown
    assert "issued by  our runs" in shown
    assert "364 days left" in shown
    assert shown.count("by a CA in --ca") == 2
    nebula("keygen", "ca", "--folder", "other", "--name", "others")
    foreign = nebula("trust", "show", "nebula-keys/west.pem", "--ca", "other/ca.pem", fails=True)
    assert "by no CA in --ca" in foreign.output
    at(NOW - datetime.timedelta(days=30), lambda: nebula("keygen", "cluster", "old", "--days", "9"), monkeypatch)
    assert "UTC, expired" in nebula("trust", "show", "nebula-keys/old.pem", fails=True).output
    at(NOW + datetime.timedelta(days=30), lambda: nebula("keygen", "cluster", "new"), monkeypatch)
    assert "UTC, not valid yet" in nebula("trust", "show", "nebula-keys/new.pem", fails=True).output
    assert "does not parse" in nebula("trust", "show", "nebula-keys/west.key", fails=True).output


def test_another_ca() -> None:
    """While one CA takes over from another, both are trusted, and certificates of both are taken."""
    nebula("keygen", "ca")
    nebula("keygen", "cluster", "west")
    nebula("keygen", "ca", "--folder", "next", "--name", "its successor")
    assert (
        "the certificate of a CA, its successor"
        in nebula("trust", "add", "next/ca.pem", "--to", "nebula-keys/ca.pem", typed="n\n", fails=True).output
    )
    nebula("trust", "add", "next/ca.pem", "--to", "nebula-keys/ca.pem", "--yes")
    assert "has it already" in nebula("trust", "add", "next/ca.pem", "--to", "nebula-keys/ca.pem").output
    nebula("keygen", "cluster", "west", "--folder", "next")
    both = Credentials("west", "nebula-keys/ca.pem", "next/west.pem", "next/west.key")
    assert check_own(Identity(both)) is None
    assert check_own(Identity(files("west"))) is None
    nebula("keygen", "cluster", "east")  # the first CA still signs
    assert check_own(Identity(files("east"))) is None
    refused = nebula("trust", "add", "nebula-keys/west.pem", "--to", "bundle.pem", "--yes", fails=True)
    assert "only the certificate of a CA can be trusted" in refused.output
