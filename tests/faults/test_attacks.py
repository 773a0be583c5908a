"""Attacks on the door of a run that trains: each is refused and counted, and the run does not notice."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_nebula.errors import NebulaError
from paddlenlp_nebula.link.entrance import knock
from paddlenlp_nebula.link.frames import Frame, Kind
from paddlenlp_nebula.security.identity import Credentials, Identity
from paddlenlp_nebula.security.throwaway import throw_away, thrown_away
from tests.faults.jobs import Stage, nothing_left

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120, func_only=True)]
STEPS = 60


def call(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def garbage(where: str) -> None:
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4000),
        Frame(Kind.KNOCK, 2**60).pack(),
        b"\x16\x03\x01" + bytes(50),
    ):
        with call(where) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            connection.recv(1)


def many(where: str) -> None:
    held = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            held.append(call(where))
    for connection in held:
        connection.close()


def slowly(where: str) -> None:
    with call(where) as connection, contextlib.suppress(OSError):
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100):
            connection.send(bytes([byte]))
            time.sleep(0.1)


def as_east(where: str, files: Credentials) -> None:
    with contextlib.suppress(NebulaError):
        knock(where, "east", ("west", "east"), timeout_s=5, identity=Identity(replace(files, cluster="east"))).close()


def test_a_run_is_not_harmed(one_machine: Stage, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    other = throw_away(["east"], tmp_path / "other")["east"]
    with one_machine.jobs(tmp_path / "run", "--steps", str(STEPS)) as (west, east):
        west.reach(3)
        found = re.search(r"meeting at (\S+); security: tls", west.find("meeting at") or "")
        assert found is not None
        where = found[1]
        keys = tmp_path / "run" / "keys"
        attacks: list[Callable[[], None]] = [
            lambda: garbage(where),
            lambda: many(where),
            lambda: slowly(where),
            lambda: as_east(where, other),  # a certificate of another CA
            lambda: as_east(where, replace(other, ca=str(keys / "ca.pem"))),
            lambda: as_east(where, thrown_away("west", keys)),  # the right CA, another name
            lambda: as_east(where, thrown_away("east", keys)),  # east's own, stolen: it is in the run already
        ]
        threads = [threading.Thread(target=attack) for attack in attacks]
        for thread in threads:
            thread.start()
        assert west.finished(STEPS, 90)
        assert east.finished(STEPS, 90)
        for thread in threads:
            thread.join()
        nothing_left(west, east)
        reports = [west.report(), east.report()]
        assert reports[0]["parameter_digest"] == reports[1]["parameter_digest"]
        assert all(report["degradations"] == [] and report["security"] == "tls" for report in reports)
        refused = reports[0]["refused_connections"]
        assert reports[1]["refused_connections"] == {}
        expected = {
            "something that is not TLS 1.3",
            "a certificate of another CA",
            "a certificate for another name",
            "a knock",
        }
        assert expected <= set(refused), refused
        assert sum(refused.values()) > 500
        said = [line for line in west.lines() if "refused at the door, 127.0.0.1" in line]
        assert 4 <= len(said) < 40
        assert not [line for line in east.lines() if "refused" in line]
