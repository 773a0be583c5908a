"""Secret files: written for the owner alone, refused when anybody else can read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.files import check_private, read_passphrase, write_private, write_public


@pytest.mark.parametrize(("write", "mode"), [(write_private, 0o600), (write_public, 0o644)])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, write: object, mode: int) -> None:
    assert callable(write)
    before = os.umask(0o377)
    try:
        write(tmp_path / "file", b"one")
        write(tmp_path / "file", b"two")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert (tmp_path / "file").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "file", b"old")

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_private(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644, 0o777])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_private(path, b"secret")
    check_private(path, "tls_key")
    path.chmod(mode)
    with pytest.raises(SecurityError, match=rf"tls_key must be for its owner alone .* has mode {mode:04o}: chmod 600"):
        check_private(path, "tls_key")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="must be a file, got"):
        check_private(tmp_path, "tls_key")
    with pytest.raises(SecurityError, match=r"must be a file that can be read, got .*No such file"):
        check_private(tmp_path / "none", "tls_key")


def test_another_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_private(path, b"secret")
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    owner = path.stat().st_uid
    with pytest.raises(SecurityError, match=f"belongs to user id {owner}: chown it"):
        check_private(path, "tls_key")


def test_passphrases(tmp_path: Path) -> None:
    path = tmp_path / "passphrase"
    write_private(path, b"open sesame\r\nanother line\n")
    assert read_passphrase(path, "tls_key_passphrase_file") == "open sesame"
    write_private(path, b"\n")
    with pytest.raises(SecurityError, match="must hold the passphrase in its first line"):
        read_passphrase(path, "tls_key_passphrase_file")
    path.chmod(0o644)
    with pytest.raises(SecurityError, match="tls_key_passphrase_file must be for its owner alone"):
        read_passphrase(path, "tls_key_passphrase_file")
