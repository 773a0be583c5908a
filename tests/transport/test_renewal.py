"""Sessions of real couriers that follow each other, new certificates in between, while chunks flow."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from paddlenlp_nebula.errors import ChannelLost
from paddlenlp_nebula.security.identity import Credentials
from paddlenlp_nebula.transport.courier import CourierChannel
from paddlenlp_nebula.transport.launch import find_mpiexec
from tests.security.certificates import Site

from . import contract
from .couriers import pair

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

_PROGRAM = """
import sys
from paddlenlp_nebula.transport import courier_process, sealed
sealed.SealedPump.__init__.__kwdefaults__["renew_records"] = 60
courier_process.main()
"""


@pytest.fixture
def hasty(tmp_path: Path) -> list[str]:
    """In place of mpiexec: starts a courier that renews its sessions after 60 records."""
    (tmp_path / "courier.py").write_text(_PROGRAM)
    script = tmp_path / "mpiexec"
    script.write_text(f"#!/bin/sh\nexec {' '.join(find_mpiexec())} -n 1 {sys.executable} {tmp_path / 'courier.py'}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return [str(script)]


def talk(west: CourierChannel, east: CourierChannel, rounds: int) -> None:
    for number in range(rounds):
        chunks = [bytes([number % 256, side]) * 400 for side in (1, 2)]
        contract.send(west, chunks[0])
        contract.send(east, chunks[1])
        assert contract.receive(east) == chunks[0]
        assert contract.receive(west) == chunks[1]


def test_a_new_certificate_is_taken_while_chunks_flow(tmp_path: Path, hasty: list[str]) -> None:
    site = Site(tmp_path / "site")
    files = {name: site.credentials(name) for name in ("west", "east")}
    with pair(mpiexec=hasty, credentials=files) as (west, east):
        talk(west, east, 40)
        assert not west.notes
        site.credentials("east", days=3)  # in the place of the old one
        talk(west, east, 80)
        assert "the certificate of cluster 'east' expires in 3.0 days" in west.notes[0]
        Path(files["east"].cert).write_text("half a certi")
        talk(west, east, 80)
        assert any("the changed TLS files of cluster 'east' were not taken" in note for note in east.notes)
        site.credentials("east", days=100)
        west.notes.clear()
        talk(west, east, 80)
        assert len(west.notes) <= 1  # of the session that was under way


def lost(channels: tuple[CourierChannel, CourierChannel], act: Callable[[], None]) -> dict[str, str]:
    """Who loses whom, and why, while ``act`` is repeated."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + 30
    while len(found) < 2 and time.monotonic() < deadline:
        for channel in channels:
            while found and channel.peek() is not None:  # what has arrived comes before the end
                channel.release()
            try:
                channel.progress()
            except ChannelLost as error:
                found[channel.peer] = error.reason
        with suppress(ChannelLost, AssertionError):
            if not found:
                act()
    return found


def test_the_other_side_is_checked_anew(tmp_path: Path, hasty: list[str]) -> None:
    """A cluster whose certificate is of another CA by now is refused at the next session, on both sides."""
    site, other = Site(tmp_path / "site"), Site(tmp_path / "other", "another CA")
    files: dict[str, Credentials] = {name: site.credentials(name) for name in ("west", "east")}
    with pair(mpiexec=hasty, credentials=files) as (west, east):
        talk(west, east, 20)
        stolen = other.credentials("east")
        for theirs, ours in ((stolen.key, files["east"].key), (stolen.cert, files["east"].cert)):
            Path(ours).write_bytes(Path(theirs).read_bytes())
        found = lost((west, east), lambda: talk(west, east, 1))
        assert (
            "cluster 'east' must show a certificate signed by a CA in tls_ca ('test CA'), got one by another"
            in found["east"]
        )
        assert "refused the certificate of cluster 'east' (unknown ca)" in found["west"]
