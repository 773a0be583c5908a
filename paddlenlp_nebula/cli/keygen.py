"""``nebula keygen``: the keys and certificates by which clusters, and signers of folders, are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.files import read_passphrase, write_private, write_public

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

    from paddlenlp_nebula.security.certificates import Authority, Key, PublicKey, SigningKey

__all__ = ["ask_passphrase", "folder_option", "keygen", "load_authority", "variables", "write_certificate"]

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("nebula-keys"),
    show_default=True,
    metavar="DIR",
    help="Where keys and certificates are.",
)
ca_passphrase_option = click.option(
    "--ca-passphrase-file", type=_FILE, metavar="FILE", help="Passphrase of the CA's key; by default it is asked for."
)
_encrypt = click.option("--encrypt", is_flag=True, help="Encrypt the key, with a passphrase that is asked for.")
_passphrase_file = click.option(
    "--passphrase-file", type=_FILE, metavar="FILE", help="Encrypt the key, with the passphrase in FILE (mode 0600)."
)


def _days(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--days", type=click.IntRange(1, 36500), default=default, show_default=True, help="How long it is valid."
    )


@click.group()
def keygen() -> None:
    """Make the keys and certificates by which clusters know each other.

    \b
        nebula keygen ca                 # once, in a safe place
        nebula keygen cluster west       # there too, for each cluster
        nebula keygen cluster east

    Each site then gets its own NAME.key and NAME.pem, and ca.pem, but never ca.key. With a site where even its key
    must not be seen elsewhere, make that there: without a ca.key, `nebula keygen cluster` writes a request, NAME.csr,
    which `nebula trust sign` turns into a certificate where ca.key is.

    `nebula keygen signer NAME` is for people who sign what they hand on, with `nebula sign`.
    """


@keygen.command()
@folder_option
@click.option("--name", default="nebula", show_default=True, help="What the CA is called in messages.")
@_days(3650)
@_encrypt
@_passphrase_file
def ca(folder: Path, name: str, days: int, encrypt: bool, passphrase_file: Path | None) -> None:
    """Make a certificate authority: ca.pem, which every site gets, and ca.key, which stays here."""
    from paddlenlp_nebula.security.certificates import Authority, pem, pem_of_key

    for path in (folder / CA_KEY, folder / CA_CERTIFICATE):
        if path.exists():
            raise SecurityError(
                f"a new CA must not replace another, whose certificates would all be refused, but {path} is there: choose "
                "another --folder, or move it away first"
            )
    passphrase = _new_passphrase(encrypt, passphrase_file)
    authority = Authority.create(name, days)
    _make(folder)
    write_private(folder / CA_KEY, pem_of_key(authority.key, passphrase))
    write_public(folder / CA_CERTIFICATE, pem(authority.certificate))
    _wrote(folder / CA_KEY, "whoever has it can join any run: keep it here, off the training machines")
    _wrote(folder / CA_CERTIFICATE, f"valid until {_day(authority.certificate)}; for every site")
    click.echo("Next, for each cluster:  nebula keygen cluster NAME" + _folder_words(folder))


@dataclass(frozen=True)
class _Options:
    """What `cluster` and `signer` can be told."""

    folder: Path
    days: int
    encrypt: bool
    passphrase_file: Path | None
    ca_passphrase_file: Path | None


def _key_options(command: Any) -> Any:
    for option in (ca_passphrase_option, _passphrase_file, _encrypt, _days(365), folder_option):
        command = option(command)
    return command


@keygen.command()
@click.argument("name")
@_key_options
def cluster(name: str, **options: Any) -> None:
    """Make a key and a certificate for the cluster NAME, as it is called in `clusters`.

    To renew a certificate, do it again: running clusters take the new files at their next session, at the latest after
    6 hours, and new connections at once.
    """
    from paddlenlp_nebula.security.certificates import new_key

    given = _Options(**options)
    if _make_holder(f"cluster {name}", name, name, new_key(), f"for {name}'s leader alone", given):
        where = variables(given.folder, name)
        click.echo(f"On {name}'s leader, with these two and {CA_CERTIFICATE} in place, set\n{where}")
        if given.encrypt or given.passphrase_file:
            click.echo("and NEBULA_TLS_KEY_PASSPHRASE_FILE to a file with the key's passphrase (mode 0600)")


@keygen.command()
@click.argument("name")
@_key_options
def signer(name: str, **options: Any) -> None:
    """Make a key and a certificate for NAME, a person or a site that signs folders with `nebula sign`.

    The files are NAME.signer.key and NAME.signer.pem. No cluster can be run with them.
    """
    from paddlenlp_nebula.security.certificates import new_signing_key

    given, stem = _Options(**options), f"{name}.signer"
    if _make_holder(f"signer {name}", name, stem, new_signing_key(), f"for {name} alone", given):
        click.echo(f"Next:  nebula sign FOLDER --key {given.folder / stem}.key")


def _make_holder(holder: str, name: str, stem: str, key: Key | SigningKey, whom: str, given: _Options) -> bool:
    """Write a key, and its certificate if there is a CA here (then True), or else a request for one."""
    from paddlenlp_nebula.security.certificates import check_name, new_request, pem, pem_of_key

    check_name(name)
    key_path, certificate_path, request_path = (given.folder / f"{stem}.{end}" for end in ("key", "pem", "csr"))
    there = (given.folder / CA_KEY).exists()
    authority = load_authority(given.folder, given.ca_passphrase_file) if there else None
    if authority is None and key_path.exists():
        raise SecurityError(
            f"a request must be for a new key, since the old one is in use until the certificate comes, but {key_path} is "
            f"there: use another --folder, and put {key_path.name} and {certificate_path.name} into their place together"
        )
    passphrase = _new_passphrase(given.encrypt, given.passphrase_file)
    _make(given.folder)
    write_private(key_path, pem_of_key(key, passphrase))
    _wrote(key_path, f"{whom}, mode 0600")
    if authority is None:
        write_public(request_path, pem(new_request(name, key)))
        _wrote(request_path, f"for whoever has {CA_KEY}, who turns it into {certificate_path.name}:")
        click.echo(f"    nebula trust sign {request_path.name}")
        _show_fingerprint(key.public_key())
        return False
    write_certificate(authority, holder, name, key.public_key(), given.days, certificate_path)
    return True


def load_authority(folder: Path, passphrase_file: Path | None) -> Authority:
    """The CA in a folder; asks for the passphrase of its key if there is one and no file for it.

    Raises:
        SecurityError: it is not there, or not in order.
    """
    from paddlenlp_nebula.security.certificates import Authority
    from paddlenlp_nebula.security.check import find_passphrase

    for path in (folder / CA_KEY, folder / CA_CERTIFICATE):
        if not path.exists():
            raise SecurityError(
                f"a CA must be in {folder}, but there is no {path.name}: run `nebula keygen ca`, or set --folder"
            )
    file = str(passphrase_file) if passphrase_file else None
    passphrase = find_passphrase(str(folder / CA_KEY), file, "the CA's key", "--ca-passphrase-file", ask_passphrase)
    return Authority.load((folder / CA_CERTIFICATE).read_bytes(), (folder / CA_KEY).read_bytes(), passphrase)


def write_certificate(authority: Authority, holder: str, name: str, key: PublicKey, days: int, path: Path) -> None:
    """Issue a certificate to a holder ("cluster west"), write it and say so."""
    from paddlenlp_nebula.security.certificates import pem

    found = authority.issue(name, key, days)
    write_public(path, pem(found))
    _wrote(path, f"{holder}, valid until {_day(found)}")


def variables(folder: Path, name: str) -> str:
    """The lines by which a site tells its cluster where the files are."""
    where = folder.resolve()
    return (
        f"    export NEBULA_TLS_CA={where / CA_CERTIFICATE}\n"
        f"    export NEBULA_TLS_CERT={where / name}.pem\n"
        f"    export NEBULA_TLS_KEY={where / name}.key"
    )


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _new_passphrase(encrypt: bool, passphrase_file: Path | None) -> str | None:
    if encrypt and passphrase_file:
        raise click.UsageError(
            "either --encrypt, which asks for a passphrase, or --passphrase-file is needed, got both"
        )
    if passphrase_file:
        return read_passphrase(passphrase_file, "--passphrase-file")
    if not encrypt:
        return None
    return str(click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True))


def ask_passphrase(prompt: str) -> str:
    return str(click.prompt(prompt, hide_input=True, err=True))


def _show_fingerprint(key: CertificatePublicKeyTypes) -> None:
    from paddlenlp_nebula.security.certificates import fingerprint

    click.echo(f"Its key's fingerprint, for comparing over the telephone:\n    {fingerprint(key)}")


def _wrote(path: Path, what: str) -> None:
    click.echo(f"{click.style('wrote', fg='green')} {path}  ({what})")


def _day(certificate: x509.Certificate) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


def _folder_words(folder: Path) -> str:
    return "" if folder == Path("nebula-keys") else f" --folder {folder}"
