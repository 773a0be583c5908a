"""Signed folders: what was signed is found again, and anything else is refused in a sentence that says what it is."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security import manifest as manifests
from paddlenlp_nebula.security.certificates import Authority, new_key, new_signing_key, pem, pem_of_key
from paddlenlp_nebula.security.check import check_own
from paddlenlp_nebula.security.files import write_private, write_public
from paddlenlp_nebula.security.identity import Credentials, Identity
from paddlenlp_nebula.security.manifest import MANIFEST, File, look_at, read_manifest, wrong_with
from paddlenlp_nebula.security.signing import sign_folder, verify_folder
from tests.security.certificates import Site, at

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)
CONTENT = {"model.safetensors": b"weights" * 1000, "adapter/config.json": b"{}", "empty": b"", "a b/ä": b"\xff"}


class Signer:
    """Alice, with a certificate of a CA."""

    def __init__(self, authority: Authority, name: str = "alice", days: int = 365) -> None:
        self.key = new_signing_key()
        self.certificate = authority.issue(name, self.key.public_key(), days)

    def sign(self, folder: Path) -> Any:
        return sign_folder(folder, self.key, self.certificate)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("our CA")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    return tmp_path / "folder"


@pytest.fixture
def signed(folder: Path, authority: Authority) -> Path:
    Signer(authority).sign(folder)
    return folder


def refused(folder: Path, authority: Authority, match: str) -> None:
    with pytest.raises(SecurityError, match=match):
        verify_folder(folder, [authority.certificate])


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    change(fields)
    (folder / MANIFEST).write_text(json.dumps(fields))


def resign(folder: Path, signer: Signer) -> None:
    """A signature by the signer of whatever the manifest says."""
    found = read_manifest(folder)
    edit(folder, lambda fields: fields.update(signature=signer.key.sign(found.signed_bytes()).hex()))


def test_what_was_signed_is_found_again(folder: Path, authority: Authority) -> None:
    signer = Signer(authority)
    said = signer.sign(folder)
    assert verify_folder(folder, [authority.certificate]) == said
    assert (said.signer, said.issuer, said.files) == ("alice", "our CA", 4)
    assert said.nbytes == sum(map(len, CONTENT.values()))
    assert said.valid_until == signer.certificate.not_valid_after_utc
    listed = {entry["path"]: entry for entry in json.loads((folder / MANIFEST).read_text())["files"]}
    assert list(listed) == sorted(CONTENT)
    for name, content in CONTENT.items():
        assert listed[name]["sha256"] == hashlib.sha256(content).hexdigest()
        assert listed[name]["size"] == len(content)
    assert verify_folder(folder, [signer.certificate]) == said  # whom one knows, without a CA
    assert signer.sign(folder).files == 4  # the manifest is not part of itself
    verify_folder(folder, [Authority.create("another").certificate, authority.certificate])


def test_each_file_that_is_not_what_was_signed_is_named(signed: Path, authority: Authority) -> None:
    (signed / "model.safetensors").write_bytes(b"Weights" + b"weights" * 999)
    (signed / "adapter/config.json").write_bytes(b"{ }")
    (signed / "empty").unlink()
    (signed / "adapter/new\nline.py").write_bytes(b"import os")
    (signed / "adapter" / MANIFEST).write_bytes(b"")
    with pytest.raises(SecurityError) as caught:
        verify_folder(signed, [authority.certificate])
    lines = str(caught.value).splitlines()
    old = hashlib.sha256(CONTENT["model.safetensors"]).hexdigest()
    new = hashlib.sha256((signed / "model.safetensors").read_bytes()).hexdigest()
    assert lines[0].endswith("must hold exactly what alice has signed, but")
    assert lines[1:] == [
        "  - 'adapter/config.json' has changed: it has 3 bytes instead of 2",
        f"  - 'adapter/{MANIFEST}' was added",
        "  - 'adapter/new\\nline.py' was added",
        "  - 'empty' is missing",
        f"  - 'model.safetensors' has changed: its SHA-256 is {new} instead of {old}",
    ]
    assert caught.value.category == "a folder that is not what was signed"


def test_a_long_list_is_cut(signed: Path, authority: Authority) -> None:
    for number in range(60):
        (signed / f"{number:03d}").touch()
    refused(signed, authority, r"'049' was added\n  - and 10 more$")


@pytest.mark.parametrize("target", ["model.safetensors", "/etc/passwd", ".."])
def test_links_are_not_followed(folder: Path, authority: Authority, target: str) -> None:
    Signer(authority).sign(folder)
    (folder / "link").symlink_to(target)
    refused(folder, authority, "'link' was added")
    (folder / "empty").unlink()
    (folder / "link").rename(folder / "empty")
    refused(folder, authority, "'empty' has changed: it is a symbolic link")
    with pytest.raises(SecurityError, match="must hold files alone, but 'empty' is a symbolic link: put a copy"):
        Signer(authority).sign(folder)


def test_a_linked_folder_is_not_entered(signed: Path, authority: Authority) -> None:
    (signed / "adapter").rename(signed.parent / "elsewhere")
    (signed / "adapter").symlink_to(signed.parent / "elsewhere")
    refused(signed, authority, "'adapter' was added\n  - 'adapter/config.json' is missing")


def test_what_is_no_file(folder: Path, authority: Authority) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(SecurityError, match="'pipe' is neither a file nor a folder"):
        Signer(authority).sign(folder)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../x", "stay in the folder"),
        ("a/../../x", "stay in the folder"),
        ("/etc/passwd", "must be relative"),
        ("a//b", "must be relative"),
        ("./a", "must be relative"),
        ("a/", "must be relative"),
        ("", "at most 1024"),
        ("a" * 1025, "at most 1024"),
        ("a/" * 33 + "b", "32 folders"),
        ("a\\b", "backslashes"),
        ("a\nb", "printable"),
        ("a\x00b", "printable"),
        ("\u202eexe", "printable"),
        ("\udcff", "printable"),
        (MANIFEST, "that of the manifest"),
        (f"{MANIFEST}/a", "that of the manifest"),
        (7, "no string"),
        (None, "no string"),
        (["a"], "no string"),
    ],
)
def test_paths_that_leave_the_folder_or_mislead(signed: Path, authority: Authority, path: Any, reason: str) -> None:
    """Even a signer that is trusted cannot have them in a manifest."""
    assert reason in str(wrong_with(path))
    edit(signed, lambda fields: fields["files"][0].update(path=path))
    refused(signed, authority, rf"must be a manifest made by `nebula sign`, but the path of file 0, .* .*{reason}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.update(format="nebula-manifest-2"), "its format is 'nebula-manifest-2' instead"),
        (lambda f: f.pop("signature"), "does not have exactly the fields"),
        (lambda f: f.update(extra=1), "does not have exactly the fields"),
        (lambda f: f.update(files={}), "its files are no list of 1 to 100000"),
        (lambda f: f.update(files=[]), "its files are no list of 1 to 100000"),
        (lambda f: f.update(files=[7]), "file 0 does not have exactly the fields"),
        (lambda f: f["files"].append(f["files"][0]), "is listed twice"),
        (lambda f: f["files"][0].update(size=-1), "no number of bytes"),
        (lambda f: f["files"][0].update(size=True), "no number of bytes"),
        (lambda f: f["files"][0].update(size="2"), "no number of bytes"),
        (lambda f: f["files"][0].update(size=1 << 63), "no number of bytes"),
        (lambda f: f["files"][0].update(size=1.0), "the number 1.0, where only whole ones belong"),
        (lambda f: f["files"][0].update(size=float("nan")), "the number NaN"),
        (lambda f: f["files"][0].update(size=10**30), "a number has 31 digits"),
        (lambda f: f["files"][0].update(sha256="A" * 64), "is not 64 hex digits"),
        (lambda f: f["files"][0].update(sha256=None), "is not 64 hex digits"),
        (lambda f: f.update(signed_at="yesterday"), "its signed_at is 'yesterday', no time"),
        (lambda f: f.update(signed_at=7), "its signed_at is no string"),
        (lambda f: f.update(certificate=None), "its certificate is no string"),
        (lambda f: f.update(certificate="nothing"), "signer's certificate in PEM, but it does not parse"),
        (lambda f: f.update(certificate="\ud800"), "signer's certificate in PEM, but it does not parse"),
        (lambda f: f.update(certificate=f["certificate"] * 99), "more than 16384 characters"),
        (lambda f: f.update(signature="zz"), "must be signed with the key of alice"),
        (lambda f: f.update(signature=""), "must be signed with the key of alice"),
        (lambda f: f.update(signature="00" * 64), "must be signed with the key of alice"),
        (lambda f: f.update(signed_at="2001-01-01T00:00:00Z"), "must be signed with the key of alice"),
        (lambda f: f["files"].pop(), "must be signed with the key of alice"),
        (lambda f: f["files"][0].update(size=9), "must be signed with the key of alice"),
        (lambda f: f["files"][0].update(path="other"), "must be signed with the key of alice"),
    ],
)
def test_hostile_manifests(signed: Path, authority: Authority, change: Callable[[Any], Any], match: str) -> None:
    edit(signed, change)
    refused(signed, authority, match)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe{\x00}\x00", "it is not UTF-8"),
        (b"[]", "it does not have exactly the fields"),
        (b'{"format": 1, "format": 2}', "a field is there twice"),
        (b"[" * 200_000, "it nests too deeply"),
        (b" " * (manifests.MAX_BYTES + 1), f"it has more than {manifests.MAX_BYTES} bytes"),
    ],
)
def test_manifests_that_are_none(signed: Path, authority: Authority, data: bytes, match: str) -> None:
    (signed / MANIFEST).write_bytes(data)
    refused(signed, authority, match)


def test_an_endless_or_linked_manifest_is_not_read(signed: Path, authority: Authority) -> None:
    (signed / MANIFEST).rename(signed.parent / "other")
    refused(signed, authority, f"must hold {MANIFEST}, but in .* it cannot be read: No such file")
    (signed / MANIFEST).symlink_to("/dev/zero")
    refused(signed, authority, "it cannot be read: Too many levels")
    (signed / MANIFEST).unlink()
    os.mkfifo(signed / MANIFEST)
    refused(signed, authority, "it is not a file")
    (signed / MANIFEST).unlink()
    (signed / MANIFEST).mkdir()
    refused(signed, authority, "it is not a file")


def test_the_signature_of_another_ca(folder: Path, authority: Authority) -> None:
    Signer(Authority.create("their CA"), "mallory").sign(folder)
    refused(
        folder, authority, r"issued by a CA that is \('our CA'\), got one that calls itself 'mallory', of 'their CA'"
    )
    namesake = Authority.create("our CA")  # the name is not enough
    Signer(namesake).sign(folder)
    refused(folder, authority, "got one that calls itself 'alice', of 'our CA'")


def test_alices_certificate_under_mallorys_signature(signed: Path, authority: Authority) -> None:
    resign(signed, Signer(authority, "mallory"))
    refused(signed, authority, "must be signed with the key of alice, whose certificate it holds, but is not")
    alice, mallory = Signer(authority), Signer(authority, "mallory")
    alice.sign(signed)
    edit(signed, lambda fields: fields.update(certificate=pem(mallory.certificate).decode()))
    refused(signed, authority, "must be signed with the key of mallory")


def test_who_is_trusted_alone(folder: Path, authority: Authority) -> None:
    alice, bob = Signer(authority), Signer(authority, "bob")
    alice.sign(folder)
    with pytest.raises(
        SecurityError, match=r"trusted, or issued by a CA that is \('bob'\), got one that calls itself 'alice'"
    ):
        verify_folder(folder, [bob.certificate])


def test_dates(folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_signing_key()

    def issued(when: datetime.datetime, by: Authority = authority) -> x509.Certificate:
        made = at(when, lambda: by.issue("alice", key.public_key(), 9), monkeypatch)
        assert isinstance(made, x509.Certificate)
        return made

    old, future, good = issued(NOW - 30 * DAY), issued(NOW + 30 * DAY), issued(NOW)
    for certificate, state in ((old, "has expired"), (future, "is not valid yet")):
        with pytest.raises(SecurityError, match=f"certificate of alice must be valid today, but {state}: it is for"):
            sign_folder(folder, key, certificate)
        sign_folder(folder, key, good)
        edit(folder, lambda fields, other=certificate: fields.update(certificate=pem(other).decode()))
        found = read_manifest(folder)
        edit(folder, lambda fields, data=found: fields.update(signature=key.sign(data.signed_bytes()).hex()))
        refused(folder, authority, f"certificate of alice must be valid today, but {state}")
        with pytest.raises(SecurityError, match=state):  # nor if one knows it
            verify_folder(folder, [certificate])
    gone = at(NOW - 30 * DAY, lambda: Authority.create("an old CA", days=9), monkeypatch)
    expired_ca = Signer(authority)
    expired_ca.certificate = (
        x509.CertificateBuilder(
            subject_name=expired_ca.certificate.subject,
            issuer_name=gone.certificate.subject,
            public_key=expired_ca.key.public_key(),
            serial_number=1,
            not_valid_before=NOW - DAY,
            not_valid_after=NOW + DAY,
            extensions=list(expired_ca.certificate.extensions),
        )
    ).sign(gone.key, hashes.SHA256())
    expired_ca.sign(folder)
    refused(folder, gone, "the certificate of the CA 'an old CA' must be valid today, but has expired")


def test_a_clusters_certificate_signs_nothing(folder: Path, authority: Authority) -> None:
    cluster = authority.issue("west", new_key().public_key())
    with pytest.raises(SecurityError, match=r"must be a signer's, with an Ed25519 key .* got one for 'west'"):
        sign_folder(folder, new_signing_key(), cluster)
    Signer(authority).sign(folder)
    edit(folder, lambda fields: fields.update(certificate=pem(cluster).decode()))
    refused(folder, authority, "must be a signer's, with an Ed25519 key .* got one for 'west'")
    refused(folder, Authority(cluster, new_key()), "must be a signer's, with an Ed25519 key")
    Signer(authority).sign(folder)
    with pytest.raises(SecurityError, match="a CA that is"):  # a certificate that is no CA's vouches for nobody
        verify_folder(folder, [cluster])


def test_a_signers_certificate_joins_no_run(tmp_path: Path) -> None:
    site, key = Site(tmp_path), new_signing_key()
    write_private(tmp_path / "west.key", pem_of_key(key))
    write_public(tmp_path / "west.pem", pem(site.authority.issue("west", key.public_key())))
    with pytest.raises(SecurityError):
        check_own(Identity(Credentials("west", str(site.ca), str(tmp_path / "west.pem"), str(tmp_path / "west.key"))))


def test_key_and_certificate_belong_together(folder: Path, authority: Authority) -> None:
    with pytest.raises(SecurityError, match="certificate of alice and the key must belong together"):
        sign_folder(folder, new_signing_key(), Signer(authority).certificate)


def test_folders_that_cannot_be_signed(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer(authority)
    with pytest.raises(SecurityError, match=r"must hold a file, but .* has none"):
        signer.sign(tmp_path)
    (tmp_path / "new\nline").touch()
    with pytest.raises(SecurityError, match=r"must have a plain name, but 'new.+line' must be made of printable"):
        signer.sign(tmp_path)
    (tmp_path / "new\nline").rename(tmp_path / "a")
    (tmp_path / "b").touch()
    monkeypatch.setattr(manifests, "MAX_FILES", 1)
    with pytest.raises(SecurityError, match="'b' is more than the 1 files"):
        signer.sign(tmp_path)
    monkeypatch.setattr(manifests, "MAX_FILES", 2)
    monkeypatch.setattr(manifests, "MAX_BYTES", 100)
    with pytest.raises(SecurityError, match="must have at most 100 bytes, but that of 2 files"):
        signer.sign(tmp_path)
    deep = tmp_path.joinpath(*["d"] * 33)
    deep.mkdir(parents=True)
    with pytest.raises(SecurityError, match="at most 32 folders may lie in each other"):
        signer.sign(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_a_file_that_grows_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.read

    def growing(descriptor: int, nbytes: int) -> bytes:
        with open(folder / "model.safetensors", "ab") as file:
            file.write(b"more")
        return read(descriptor, nbytes)

    monkeypatch.setattr(os, "read", growing)
    with pytest.raises(SecurityError, match=r"'model\.safetensors' must stay as it is while it is read"):
        look_at(folder)


def test_no_more_is_read_than_was_signed(signed: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(signed / "model.safetensors", "ab") as file:
        file.truncate(1 << 40)
    with open(signed / "new", "ab") as file:
        file.truncate(1 << 40)
    seen: list[int] = []
    monkeypatch.setattr(
        os, "read", lambda descriptor, nbytes, read=os.read: seen.append(nbytes) or read(descriptor, nbytes)
    )
    refused(signed, authority, "has 1099511627776 bytes instead of 7000")
    assert sum(seen) < 100


def test_files_of_several_pieces(tmp_path: Path) -> None:
    content = os.urandom((2 << 20) + 7)
    (tmp_path / "file").write_bytes(content)
    assert look_at(tmp_path) == {"file": File(len(content), hashlib.sha256(content).hexdigest())}


def test_another_curve_is_no_signer(folder: Path, authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(SecurityError, match="must be a signer's"):
        sign_folder(folder, new_signing_key(), authority.issue("west", key.public_key()))
