"""``nebula sign`` and ``nebula verify``: a folder that is handed on, and who has made what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paddlenlp_nebula.cli.keygen import ask_passphrase
from paddlenlp_nebula.cli.trust import certificates_in
from paddlenlp_nebula.errors import SecurityError

if TYPE_CHECKING:
    from paddlenlp_nebula.security.signing import Signed

__all__ = ["sign", "verify"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--key", type=_FILE, required=True, metavar="FILE", help="Your key, NAME.signer.key of `nebula keygen signer`."
)
@click.option("--cert", type=_FILE, metavar="FILE", help="Its certificate; by default the .pem file beside the key.")
@click.option(
    "--passphrase-file",
    type=_FILE,
    metavar="FILE",
    help="Passphrase of the key (mode 0600); by default it is asked for.",
)
def sign(folder: Path, key: Path, cert: Path | None, passphrase_file: Path | None) -> None:
    """Sign all files in FOLDER, adapters or a checkpoint, before you hand it on.

    \b
        nebula sign runs/west/checkpoint-100 --key alice.signer.key
        nebula verify checkpoint-100 --from ca.pem                   # wherever it has arrived

    It gets a file more, nebula_manifest.json. Sign last: whatever changes afterwards will be noticed.
    """
    from paddlenlp_nebula.security.certificates import load_signing_key
    from paddlenlp_nebula.security.check import find_passphrase
    from paddlenlp_nebula.security.manifest import MANIFEST
    from paddlenlp_nebula.security.signing import sign_folder

    file = str(passphrase_file) if passphrase_file else None
    passphrase = find_passphrase(str(key), file, "--key", "--passphrase-file", ask_passphrase)
    private = load_signing_key(key.read_bytes(), passphrase)
    cert = cert or key.with_suffix(".pem")
    if not cert.exists():
        raise SecurityError(f"the certificate for {key} must be beside it, but there is no {cert}: set --cert")
    signed = sign_folder(folder, private, certificates_in(cert)[0])
    wrote = f"{click.style('wrote', fg='green')} {folder / MANIFEST}"
    click.echo(f"{wrote}  ({_amount(signed)}, signed by {signed.signer})")


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--from",
    "sources",
    type=_FILE,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Whose signature is trusted: a CA's certificate (all its signers) or a signer's; may be given several times.",
)
def verify(folder: Path, sources: tuple[Path, ...]) -> None:
    """Make sure that FOLDER holds exactly what somebody you trust has signed, before anything of it is loaded.

    It says who it was, or names each file that is missing, added or changed; the exit code is then 2. It says nothing
    about what the files do: load weights from a signer whose code you would run.
    """
    from paddlenlp_nebula.security.signing import verify_folder

    signed = verify_folder(folder, [found for path in sources for found in certificates_in(path)])
    click.echo(
        f"{click.style('fine', fg='green')}: {folder} is what {click.style(signed.signer, bold=True)} has signed, by their clock on "
        f"{signed.signed_at.replace('T', ' ').replace('Z', ' UTC')}: {_amount(signed)}"
    )
    click.echo(f"(certificate by {signed.issuer}, valid until {signed.valid_until:%Y-%m-%d})")


def _amount(signed: Signed) -> str:
    return f"{signed.files} file{'s' * (signed.files != 1)}, {signed.nbytes / 1e6:.1f} MB"
