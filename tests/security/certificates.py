"""Certificates for tests, good and bad."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddlenlp_nebula.security import certificates
from paddlenlp_nebula.security.certificates import Authority, new_key, pem, pem_of_key
from paddlenlp_nebula.security.files import write_private, write_public
from paddlenlp_nebula.security.identity import Credentials, Identity


class Site:
    """A CA and a folder in which it issues certificates.

    Args:
        folder: an empty one.
        name: the CA's.
    """

    def __init__(self, folder: Path, name: str = "test CA") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority = Authority.create(name)
        self.ca = folder / "ca.pem"
        write_public(self.ca, pem(self.authority.certificate))

    def credentials(
        self, name: str, *, file: str | None = None, days: int = 365, ca: Path | None = None
    ) -> Credentials:
        """Files for a cluster of that name; replaced if they are there."""
        stem = file or name
        key = new_key()
        found = Credentials(
            name, str(ca or self.ca), str(self.folder / f"{stem}.pem"), str(self.folder / f"{stem}.key")
        )
        write_private(Path(found.key), pem_of_key(key))
        write_public(Path(found.cert), pem(self.authority.issue(name, key.public_key(), days)))
        return found

    def identity(self, name: str, note: Callable[[str], None] = print, **more: Any) -> Identity:
        """Such a cluster's identity."""
        return Identity(self.credentials(name, **more), note)


def at(when: datetime.datetime, act: Callable[[], Any], monkeypatch: Any) -> Any:
    """Do something by a clock that shows another time, as far as certificates are made by it."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return when

    class Module:
        datetime, timedelta, timezone = Clock, datetime.timedelta, datetime.timezone

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Module)
        return act()
