"""``nebula sign`` and ``nebula verify``, with keys of ``nebula keygen signer``: from one party to another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from paddlenlp_nebula.security.files import write_private
from paddlenlp_nebula.security.manifest import MANIFEST
from tests.cli.test_keygen import mode, nebula

KEYS = "nebula-keys"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("adapter/deep")
    Path("adapter/lora_model_state.pdparams").write_bytes(b"weights")
    Path("adapter/deep/config.json").write_text("{}")


def test_from_one_party_to_another() -> None:
    nebula("keygen", "ca", "--name", "our lab")
    made = nebula("keygen", "signer", "alice")
    assert f"nebula sign FOLDER --key {KEYS}/alice.signer.key" in made.output
    assert mode(f"{KEYS}/alice.signer.key") == 0o600
    assert "the certificate of signer alice" in nebula("trust", "show", f"{KEYS}/alice.signer.pem").output
    wrote = nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key")
    assert f"wrote adapter/{MANIFEST}  (2 files, 0.0 MB, signed by alice)" in wrote.output
    shutil.copytree("adapter", "elsewhere")
    fine = nebula("verify", "elsewhere", "--from", f"{KEYS}/ca.pem")
    assert "fine: elsewhere is what alice has signed, by their clock on " in fine.output
    assert "(certificate by our lab, valid until 20" in fine.output
    nebula("verify", "elsewhere", "--from", f"{KEYS}/alice.signer.pem")
    Path("elsewhere/lora_model_state.pdparams").write_bytes(b"Weights")
    Path("elsewhere/more").touch()
    os.remove("elsewhere/deep/config.json")
    refused = nebula("verify", "elsewhere", "--from", f"{KEYS}/ca.pem", fails=True)
    assert refused.exit_code == 2
    for sentence in (
        "'elsewhere' must hold exactly what alice has signed, but",
        "'lora_model_state.pdparams' has changed: its SHA-256 is",
        "'more' was added",
        "'deep/config.json' is missing",
    ):
        assert sentence in refused.output


def test_whose_signature_is_trusted() -> None:
    for folder, name in ((KEYS, "alice"), ("theirs", "mallory")):
        nebula("keygen", "ca", "--folder", folder, "--name", folder)
        nebula("keygen", "signer", name, "--folder", folder)
    nebula("sign", "adapter", "--key", "theirs/mallory.signer.key")
    refused = nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem", fails=True)
    assert "got one that calls itself 'mallory', of 'theirs'" in refused.output
    nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem", "--from", "theirs/ca.pem")
    assert "Missing option '--from'" in nebula("verify", "adapter", fails=True).output


def test_a_request_keeps_the_key_at_home() -> None:
    nebula("keygen", "ca")
    there = nebula("keygen", "signer", "bob", "--folder", "site")
    assert sorted(os.listdir("site")) == ["bob.signer.csr", "bob.signer.key"]
    assert "nebula trust sign bob.signer.csr" in there.output
    assert "certificate for signer bob" in nebula("trust", "show", "site/bob.signer.csr").output
    unsigned = nebula("sign", "adapter", "--key", "site/bob.signer.key", fails=True)
    assert "must be beside it, but there is no site/bob.signer.pem: set --cert" in unsigned.output
    signed = nebula("trust", "sign", "site/bob.signer.csr", typed="y\n")
    assert "asks for a certificate for signer bob" in signed.output
    nebula("sign", "adapter", "--key", "site/bob.signer.key")
    assert "is what bob has signed" in nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem").output


def test_a_key_that_is_not_in_order() -> None:
    nebula("keygen", "ca")
    nebula("keygen", "signer", "alice")
    nebula("keygen", "cluster", "west")
    of_a_cluster = nebula("sign", "adapter", "--key", f"{KEYS}/west.key", fails=True)
    assert "--key must be an Ed25519 key" in of_a_cluster.output
    os.chmod(f"{KEYS}/alice.signer.key", 0o640)
    open_to_others = nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key", fails=True)
    assert "--key must be for its owner alone (mode 0600)" in open_to_others.output
    assert not Path("adapter", MANIFEST).exists()


def test_encrypted_keys() -> None:
    write_private(Path("word"), b"of alice\n")
    nebula("keygen", "ca")
    nebula("keygen", "signer", "alice", "--passphrase-file", "word")
    assert b"ENCRYPTED" in Path(f"{KEYS}/alice.signer.key").read_bytes()
    wrong = nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key", typed="guess\n", fails=True)
    assert "its passphrase the right one" in wrong.output
    nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key", typed="of alice\n")
    nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key", "--passphrase-file", "word")
    nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\xff" * 100, "it is not UTF-8"),
        (b"[" * 100_000, "it nests too deeply"),
        (b" " * ((1 << 25) + 1), "it has more than 33554432 bytes"),
    ],
)
def test_hostile_manifests_end_in_a_sentence(data: bytes, sentence: str) -> None:
    nebula("keygen", "ca")
    Path("adapter", MANIFEST).write_bytes(data)
    refused = nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem", fails=True)
    assert f"must be a manifest made by `nebula sign`, but {sentence}" in refused.output
    assert "Traceback" not in refused.output


def test_a_path_that_leaves_the_folder_ends_in_a_sentence() -> None:
    nebula("keygen", "ca")
    nebula("keygen", "signer", "alice")
    nebula("sign", "adapter", "--key", f"{KEYS}/alice.signer.key")
    fields = json.loads(Path("adapter", MANIFEST).read_text())
    fields["files"][0]["path"] = "../../etc/passwd"
    Path("adapter", MANIFEST).write_text(json.dumps(fields))
    refused = nebula("verify", "adapter", "--from", f"{KEYS}/ca.pem", fails=True)
    assert "the path of file 0, '../../etc/passwd', must be relative and stay in the folder" in refused.output
