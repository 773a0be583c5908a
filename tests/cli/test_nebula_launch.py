"""`nebula launch` with real processes: plain Python scripts, so that each test takes a second or two."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

NEBULA = [sys.executable, "-m", "paddlenlp_nebula.cli"]

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a Python script that knows its cluster's name as ``me``; returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "script.py"
        head = "import os, signal, subprocess, sys, time\nme = os.environ['NEBULA_CLUSTER']\n"
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Lists the living processes of this test, found by a variable in their environment."""
    monkeypatch.setenv("NEBULA_TEST_MARK", str(tmp_path))

    def living() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("NEBULA_TEST_MARK") == str(tmp_path):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    yield living
    for pid in living():
        os.kill(pid, signal.SIGKILL)


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([*NEBULA, "launch", *words], capture_output=True, text=True, timeout=40, env=environment)


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_each_cluster_gets_its_variables_its_name_and_its_label(script: Script) -> None:
    path = script(
        """
        print("v", me, os.environ["NEBULA_CLUSTERS"], os.environ["NEBULA_RENDEZVOUS"], os.environ["OMP_NUM_THREADS"])
        print("a", sys.argv[1:])
        """
    )
    done = launch(
        "--local-clusters", "3", path, "--output_dir", "out/{cluster}", "--max_steps", "-1", OMP_NUM_THREADS="5"
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    (addresses,) = set(re.findall(r"(?:127\.0\.0\.1:\d+,?)+", done.stdout))
    assert len(set(addresses.split(","))) == 3  # a door for each
    for name in ("west", "east", "north"):
        label = f"{name:<5} | "
        assert f"{label}v {name} west,east,north {addresses} 5" in lines
        assert f"{label}a ['--output_dir', 'out/{name}', '--max_steps', '-1']" in lines


def test_names_can_be_chosen_and_output_kept(script: Script, tmp_path: Path) -> None:
    done = launch("--clusters", "a,b", "--log-dir", str(tmp_path / "logs"), script("print('I am', me)"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["a | I am a", "b | I am b"]
    assert (tmp_path / "logs/b/cluster.log").read_text() == "I am b\n"


@pytest.mark.parametrize(
    ("death", "said", "code"),
    [
        ("sys.exit(7)", "cluster east ended with exit code 7", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", "cluster east was ended by SIGKILL (signal 9)", 137),
        ("raise ValueError('a reason')", "cluster east ended with exit code 1", 1),
    ],
)
def test_a_failure_is_named_and_the_others_go_on(
    script: Script, death: str, said: str, code: int, tmp_path: Path
) -> None:
    path = script(
        f"""
        pid = {str(tmp_path / "pid")!r}
        if me == "east":
            with open(pid + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(pid + ".new", pid)
            {death}
        while not os.path.exists(pid) or os.path.exists("/proc/" + open(pid).read()):
            time.sleep(0.05)  # until the launcher has seen it
        print("finished")
        """
    )
    done = launch("--local-clusters", "2", path)
    assert done.returncode == code
    assert f"{said}; west may go on" in done.stderr
    assert f"failed: {said}" in done.stderr
    assert "west | finished" in done.stdout


def test_a_refusal_is_the_last_word(script: Script) -> None:
    """The same on both clusters, said once, whatever is printed after it; tracebacks stay as they are."""
    path = script(
        """
        import atexit
        from paddlenlp_nebula.errors import ConfigurationError
        atexit.register(print, "a long dump of arguments")
        raise ConfigurationError(["max_steps must be 3", "seed must be 4"])
        """
    )
    done = launch("--local-clusters", "2", path)
    assert done.returncode == 1
    assert done.stdout.count("| Traceback (most recent call last):") == 2
    assert done.stderr.splitlines()[-3:] == [
        "nebula: the configuration has 2 problems:",
        "  - max_steps must be 3",
        "  - seed must be 4",
    ]


def test_ctrl_c_lets_them_say_goodbye(script: Script, mark: Callable[[], list[int]]) -> None:
    path = script(
        """
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
        print("ready", flush=True)
        try:
            time.sleep(99)
        except KeyboardInterrupt:
            print("goodbye")
            helper.terminate()
            helper.wait()
            sys.exit(5)
        """
    )
    command = [*NEBULA, "launch", "--local-clusters", "2", path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert sorted(output.splitlines()) == ["east | goodbye", "west | goodbye"]
    assert errors.splitlines()[1:] == ["nebula: ended early by SIGINT"]  # nobody has failed
    assert process.returncode == 130
    assert mark() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stubborn_processes_and_their_helpers_are_gone(
    script: Script, mark: Callable[[], list[int]], number: signal.Signals
) -> None:
    path = script(
        """
        deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(99)"
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        for s in (2, 15):
            signal.signal(s, signal.SIG_IGN)
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(99)
        """
    )
    process = subprocess.Popen(
        [*NEBULA, "launch", "--local-clusters", "2", "--grace-s", "0.5", path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    assert len(mark()) == 5
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert mark() == []


def test_helpers_of_a_killed_cluster_are_gone_while_the_other_trains(
    script: Script, mark: Callable[[], list[int]], tmp_path: Path
) -> None:
    path = script(
        f"""
        if me == "east":
            subprocess.Popen(["sleep", "99"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists({str(tmp_path / "stop")!r}):
            time.sleep(0.1)
        """
    )
    process = subprocess.Popen([*NEBULA, "launch", "--local-clusters", "2", path], stderr=subprocess.PIPE, text=True)

    def names() -> list[str]:
        return [psutil.Process(pid).name() for pid in mark()]

    wait_for(lambda: "sleep" in names())
    wait_for(lambda: "sleep" not in names())
    assert len(mark()) == 2  # the launcher and west
    wait_for(lambda: all(c.status() != psutil.STATUS_ZOMBIE for c in psutil.Process(process.pid).children()))
    (tmp_path / "stop").touch()
    assert process.wait(timeout=20) == 137


def test_a_killed_launcher_takes_its_clusters_along(script: Script, mark: Callable[[], list[int]]) -> None:
    path = script("print('ready', flush=True)\ntime.sleep(99)")
    process = subprocess.Popen([*NEBULA, "launch", "--local-clusters", "2", path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.kill()
    process.wait()
    wait_for(lambda: mark() == [])


def test_an_orphan_of_a_finished_run_is_not_waited_for_long(script: Script, mark: Callable[[], list[int]]) -> None:
    done = launch("--local-clusters", "1", script("subprocess.Popen(['sleep', '99'], start_new_session=True)"))
    assert done.returncode == 0
    assert mark() == []


def test_one_site_becomes_its_cluster(script: Script) -> None:
    path = script("print(me, os.environ['NEBULA_RENDEZVOUS'], sys.argv[1:], os.getppid())\nsys.exit(9)")
    done = launch("--cluster", "east", "--clusters", "west,east", "--rendezvous", "h.example:29400", path, "{cluster}")
    assert done.returncode == 9
    assert done.stdout == f"east h.example:29400 ['east'] {os.getpid()}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "it must be said which clusters start here"),
        (["--local-clusters", "2", "--cluster", "west"], "either --local-clusters or --cluster"),
        (["--local-clusters", "2", "--rendezvous", "h:1"], "--rendezvous goes with --cluster"),
        (["--cluster", "x", "--clusters", "west,east", "--rendezvous", "h"], "the configuration has 2 problems"),
        (["--cluster", "west"], "--cluster west needs --clusters A,B and --rendezvous HOST:PORT"),
        (["--cluster", "west", "--clusters", "west,east"], "--cluster west needs --rendezvous HOST:PORT beside it"),
        (["-n", "2"], "-n"),  # as for mpirun
        (["--local-cluster", "2"], "--local-clusters"),
    ],
)
def test_contradictions_are_refused(script: Script, words: list[str], said: str) -> None:
    done = launch(*words, script("print('started')"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_options_may_be_written_as_paddlenlps_are(script: Script) -> None:
    done = launch("--local_clusters", "1", "--grace_s=3", script("print(sys.argv[1:])"), "--local_clusters", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "west | ['--local_clusters', '7']\n"


def test_options_behind_the_script_are_pointed_out(script: Script) -> None:
    path = script("print(sys.argv[1:])")
    refused = launch(path, "--clusters", "west,east", "--local_clusters=2")
    assert refused.returncode == 2
    for option in ("--clusters", "--local-clusters"):
        assert f"{option} stands behind {path}, so it is the script's" in refused.stderr
    done = launch("--local-clusters", "1", path, "--processes_per_cluster", "2", "--cluster", "west")
    assert done.stdout == "west | ['--processes_per_cluster', '2', '--cluster', 'west']\n"
    assert "--processes-per-cluster stands behind" in done.stderr
    assert "--cluster stands" not in done.stderr  # a field of NebulaArguments


def test_without_mpiexec_no_cluster_is_started(script: Script, tmp_path: Path) -> None:
    path = script("print('started')")
    python = tmp_path / "python"  # elsewhere, so that no mpiexec lies beside it
    python.symlink_to(sys.executable)
    done = subprocess.run(
        [str(python), *NEBULA[1:], "launch", "--local-clusters", "2", path],
        capture_output=True, text=True, timeout=40,
        env={**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no mpiexec next to {python} or on PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shared_output_dir_is_warned_of(script: Script) -> None:
    done = launch("--local-clusters", "2", script(""), "--output_dir", "out")
    assert "--output_dir out/{cluster}" in done.stderr


def test_what_the_system_refuses_is_a_sentence(script: Script, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    done = launch("--local-clusters", "1", "--log-dir", str(tmp_path / "logs/deep"), script("print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"Error: {tmp_path}/logs/deep/west: Not a directory"


@pytest.mark.parametrize(("sink", "said"), [("> /dev/full", "Error: No space left on device"), ("| head -1", None)])
def test_output_that_nobody_takes_ends_the_run(
    script: Script, mark: Callable[[], list[int]], sink: str, said: str | None
) -> None:
    path = script("for _ in range(400):\n    print('x' * 999, flush=True)\n    time.sleep(0.1)")
    words = shlex.join([*NEBULA, "launch", "--local-clusters", "2", path])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{words} {sink}"], capture_output=True, text=True, timeout=40
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("nebula: starting")] == [said] * bool(said)
    assert mark() == []


def test_nohup_is_respected(script: Script) -> None:
    path = script("print('ready', flush=True)\ntime.sleep(1)\nprint('finished')")
    command = ["nohup", *NEBULA, "launch", "--local-clusters", "2", path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=20)[0].count("finished") == 2
    assert process.returncode == 0


def test_what_the_terminal_cannot_show_is_replaced(script: Script) -> None:
    path = script("sys.stdout.buffer.write('50 % █ ä\\n'.encode())")
    done = launch("--local-clusters", "1", path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "west | 50 % ? ?\n")


def test_ctrl_c_that_ends_the_reader_as_well_lets_them_save(script: Script, tmp_path: Path) -> None:
    """As in `nebula launch ... | tee log`."""
    path = script(
        f"""
        print("ready", flush=True)
        try:
            time.sleep(99)
        except KeyboardInterrupt:
            print("saving", flush=True)
            time.sleep(0.5)
            open({str(tmp_path)!r} + "/saved." + me, "w").close()
        """
    )
    command = [*NEBULA, "launch", "--local-clusters", "2", path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert {file.name for file in tmp_path.glob("saved.*")} == {"saved.west", "saved.east"}
