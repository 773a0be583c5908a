"""``nebula trust``: whose certificates are these, and whom to give one."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paddlenlp_nebula.cli.keygen import (
    CA_CERTIFICATE,
    ca_passphrase_option,
    folder_option,
    load_authority,
    write_certificate,
)
from paddlenlp_nebula.errors import SecurityError
from paddlenlp_nebula.security.files import write_public

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["certificates_in", "trust"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SOON_DAYS = 14


@click.group()
def trust() -> None:
    """Look at certificates, sign requests for them, and trust another CA.

    Who may take part in a run is decided twice: by its CA, which signs a certificate for each cluster, and by `clusters`,
    the list of names: a cluster that is not in it is refused whatever certificate it has.
    """


@trust.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--ca", type=_FILE, metavar="FILE", help="Also say whether they are signed by a CA in FILE.")
def show(files: tuple[Path, ...], ca: Path | None) -> None:
    """Show what is in certificates and requests; the exit code is 1 if one of them cannot be used today."""
    authorities = certificates_in(ca) if ca else []
    fine = True
    for path in files:
        data = path.read_bytes()
        if b"CERTIFICATE REQUEST" in data:
            _show_request(path, data)
            continue
        for found in certificates_in(path):
            fine &= _show(path, found, authorities, asked=ca is not None)
    sys.exit(0 if fine else 1)


@trust.command()
@click.argument("request", type=_FILE)
@folder_option
@click.option("--days", type=click.IntRange(1, 36500), default=365, show_default=True, help="How long it is valid.")
@click.option("--yes", is_flag=True, help="Do not ask whether the fingerprint is the right one.")
@ca_passphrase_option
def sign(request: Path, folder: Path, days: int, yes: bool, ca_passphrase_file: Path | None) -> None:
    """Turn REQUEST, from `nebula keygen cluster` or `signer` somewhere else, into a certificate beside it."""
    from paddlenlp_nebula.security.certificates import read_request

    found = read_request(request.read_bytes())
    click.echo(
        f"{request} asks for a certificate for {found.holder}; its key's fingerprint is\n    {found.fingerprint}"
    )
    if not yes:
        _confirm("Is that what the other site sees?")
    authority = load_authority(folder, ca_passphrase_file)
    write_certificate(authority, found.holder, found.name, found.key, days, request.with_suffix(".pem"))
    click.echo(f"Send it back to {found.name}, with {CA_CERTIFICATE} if it has none yet.")


@trust.command()
@click.argument("ca", type=_FILE)
@click.option(
    "--to", "bundle", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE",
    help="The tls_ca file that it is added to.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
def add(ca: Path, bundle: Path, yes: bool) -> None:
    """Trust another CA beside those in FILE, such as its successor while certificates are being replaced.

    Each CA in the file can then issue a certificate for any cluster's name.
    """
    from paddlenlp_nebula.security.certificates import is_authority, pem

    there = certificates_in(bundle) if bundle.exists() else []
    new = [found for found in certificates_in(ca) if found not in there]
    if not new:
        click.echo(f"{bundle} has it already")
        return
    for found in new:
        if not is_authority(found):
            raise SecurityError(
                f"only the certificate of a CA can be trusted to sign others, but {ca} has one of {_names(found)}"
            )
        _show(ca, found, [], asked=False)
    if not yes:
        _confirm(f"Trust it in {bundle}?")
    write_public(bundle, b"".join(map(pem, [*there, *new])))
    click.echo(f"{click.style('wrote', fg='green')} {bundle}  ({len(there) + len(new)} CAs)")


def _confirm(question: str) -> None:
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as error:  # also where nobody can be asked
        raise click.ClickException(
            "nothing was written: answer y, or add --yes when you have compared the fingerprints"
        ) from error


def certificates_in(path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise SecurityError(
            f"a certificate or a request in PEM was expected in {path}, but it does not parse: {error}"
        ) from error


def _show_request(path: Path, data: bytes) -> None:
    from paddlenlp_nebula.security.certificates import read_request

    found = read_request(data)
    click.echo(f"{click.style(str(path), bold=True)}: a request for a certificate for {found.holder}")
    _row("key", found.fingerprint)


def _show(path: Path, found: x509.Certificate, authorities: list[x509.Certificate], *, asked: bool) -> bool:
    """Print one certificate; whether it can be used today."""
    from paddlenlp_nebula.security.certificates import fingerprint, is_issued_by

    now = datetime.datetime.now(datetime.timezone.utc)
    left = found.not_valid_after_utc - now
    fine = found.not_valid_before_utc <= now <= found.not_valid_after_utc
    state = (
        ("not valid yet", "red") if now < found.not_valid_before_utc
        else ("expired", "red") if not fine
        else (f"{left.days} days left", "yellow" if left.days < _SOON_DAYS else "green")
    )  # fmt: skip
    click.echo(f"{click.style(str(path), bold=True)}: the certificate of {_names(found)}")
    _row("issued by", found.issuer.rfc4514_string().removeprefix("CN="))
    dates = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} to {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    _row("valid", f"{dates}, {click.style(state[0], fg=state[1])}")
    _row("key", fingerprint(found.public_key()))
    if asked:
        signed = any(is_issued_by(found, authority) for authority in authorities)
        _row(
            "signed",
            click.style("by a CA in --ca", fg="green") if signed else click.style("by no CA in --ca", fg="red"),
        )
        fine &= signed
    return fine


def _names(found: x509.Certificate) -> str:
    from paddlenlp_nebula.security.certificates import cluster_names, is_authority, signer_name

    if is_authority(found):
        return f"a CA, {found.subject.rfc4514_string().removeprefix('CN=')}"
    if signer := signer_name(found):
        return f"signer {signer}"
    names = ", ".join(sorted(cluster_names(found)))
    return f"cluster {names}" if names else "no cluster"


def _row(label: str, text: str) -> None:
    click.echo(f"  {label:<10} {text}")
