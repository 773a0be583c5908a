"""Names, addresses, variables and commands of clusters."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from paddlenlp_nebula.arguments import NebulaArguments
from paddlenlp_nebula.errors import ConfigurationError
from paddlenlp_nebula.launch.roster import local_roster, paddle_command, secured, split_devices, thread_variables
from paddlenlp_nebula.security.check import check_own
from paddlenlp_nebula.security.identity import Credentials, Identity


def test_names_by_count() -> None:
    assert local_roster(2, None).names == ("west", "east")
    assert local_roster(6, None).names == ("west", "east", "north", "south", "c5", "c6")
    assert len(set(local_roster(64, None).names)) == 64


def test_names_of_choice() -> None:
    assert local_roster(None, "a, b,c").names == ("a", "b", "c")
    assert local_roster(2, "a,b").names == ("a", "b")


@pytest.mark.parametrize(
    ("count", "names"), [(3, "a,b"), (0, None), (65, None), (None, "a,a"), (None, "a,"), (None, "a/b")]
)
def test_names_that_cannot_be(count: int | None, names: str | None) -> None:
    with pytest.raises(ConfigurationError, match="must"):
        local_roster(count, names)


def test_the_port_is_free_and_nebula_arguments_accept_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    roster = local_roster(3, None)
    addresses = roster.rendezvous.split(",")
    assert len(set(addresses)) == 3
    for address in addresses:
        host, _, port = address.partition(":")
        with socket.socket() as door:
            door.bind((host, int(port)))
    for name in roster.names:
        for variable, value in roster.environment(name).items():
            monkeypatch.setenv(variable, value)
        arguments = NebulaArguments(sync_security="none")
        assert (arguments.cluster_name, arguments.cluster_names) == (name, roster.names)


def test_certificates_are_there_while_the_clusters_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with secured(local_roster(2, None)) as roster:
        folder = roster.certificates
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in roster.names:
            for variable, value in roster.environment(name).items():
                monkeypatch.setenv(variable, value)
            arguments = NebulaArguments(sync_security="tls")
            files = Credentials(name, str(arguments.tls_ca), str(arguments.tls_cert), str(arguments.tls_key))
            assert check_own(Identity(files)) is None
            words = roster.overrides(name)
            assert words[words.index("--tls_key") + 1] == files.key
        assert not list(folder.glob("ca.key"))
    assert not folder.exists()


def test_names_that_are_not_ascii_have_no_certificates() -> None:
    with secured(local_roster(None, "zürich,bern")) as roster:
        assert roster.certificates is None
        assert set(roster.environment("bern")) == {"NEBULA_CLUSTER", "NEBULA_CLUSTERS", "NEBULA_RENDEZVOUS"}


def test_threads_are_shared_out_unless_the_user_has_chosen() -> None:
    cores = len(os.sched_getaffinity(0))
    assert thread_variables(1, {})["OMP_NUM_THREADS"] == str(cores)
    assert thread_variables(10 * cores, {})["OMP_NUM_THREADS"] == "1"
    chosen = thread_variables(2, {"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in chosen
    assert "MKL_NUM_THREADS" in chosen


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [(0, "0,1,2,3", "0,1"), (1, "0,1,2,3", "2,3"), (1, "GPU-a, GPU-b", "GPU-b"), (1, "0", None), (0, "", None)],
)
def test_devices_are_shared_out(index: int, visible: str, expected: str | None) -> None:
    assert split_devices(index, 2, {"CUDA_VISIBLE_DEVICES": visible}).get("CUDA_VISIBLE_DEVICES") == expected


def test_commands() -> None:
    assert paddle_command("t.py", ["--a", "1"], 1, Path("log/w")) == [sys.executable, "-u", "t.py", "--a", "1"]
    assert paddle_command("t.py", ["--a"], 2, Path("log/w"))[2:] == [
        *("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log/w", "t.py", "--a"),
    ]
