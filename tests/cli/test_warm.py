"""The command server: what a shell sees of a forwarded command is what its own process would do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, gone
from disturbing import hold, let_go
from other_users import OTHER, another_user
from running import running
from shell import CLEAN_ENVIRON
from terminal import seen_on_a_terminal
from waiting import wait_until

from warmd.cli.warm import forward
from warmd.cli.warm.forward import COMMANDS
from warmd.cli.warm.request import GO, SOCKET
from warmd.configs.config import load

WARMD = [sys.executable, "-m", "warmd.cli"]
HERE = [sys.executable, "-c", "import sys; from warmd.cli.main import main; sys.exit(main())"]
MODULE = "warmd.cli.command_server"
# Prints the modules that commands import after the server's own, a line each.
IMPORTS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from warmd.cli.main import main
from warmd.cli.command_server import preload
preload()
for arguments in json.loads(sys.argv[1]):
    known = set(sys.modules)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(arguments)
    print(arguments, *sorted(name for name in set(sys.modules) - known if "encodings" not in name))
"""


def run(
    command: list[str],
    *arguments: str,
    home: Path,
    folder: Path | None = None,
    encoding: str | None = None,
    **environ: str,
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command for a home."""
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        encoding=encoding or "utf-8",
        env={**CLEAN_ENVIRON, "WARMD_HOME": str(home), **environ},
        cwd=folder,
    )
    return done.returncode, done.stdout, done.stderr


def server(daemon: Daemon) -> psutil.Process | None:
    """The command server of a daemon."""
    found = running(MODULE, parent=psutil.Process(daemon.pid("supervisor")))
    return found[0] if found else None


def is_warm(daemon: Daemon) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(daemon.home.sockets / SOCKET))
    except OSError:
        return False
    return True


def warm_up(daemon: Daemon) -> psutil.Process:
    """Let a command start the server of a daemon, unless it runs."""
    if not is_warm(daemon):
        run(WARMD, "queue", home=daemon.home.path)
        wait_until(lambda: is_warm(daemon), timeout_s=30)
    found = server(daemon)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    job = shared_daemon.submit(samples=4)
    shared_daemon.wait(job, "finished")
    warm_up(shared_daemon)
    return shared_daemon


@pytest.fixture
def job(daemon: Daemon) -> str:
    return daemon.submit(samples=2)


EXAMPLES = [
    "queue",
    "queue --json",
    "jobs --all --limit 3",
    "jobs --kind sweep",
    "jobs --kind eval --best arithmetic",
    "show {job}",
    "show {job} --json",
    "result {job}",
    "tail {job}",
    "samples {job}",
    "plot {job}",
    "diff {job} {job}",
    "models",
    "submit grpo --help",
    "--help",
    "--version",
    "-h",
    # Errors, and their exit codes.
    "show nothing",
    "queue --nothing",
    "queue 1 2",
    "jobs --limit x",
]


CHANGING = ("status", "jobs --since 12h")  # what they print changes with the time


@pytest.mark.parametrize(
    "example",
    [*EXAMPLES[:4], *(pytest.param(one, marks=pytest.mark.slow) for one in EXAMPLES[4:])],
)
def test_a_forwarded_command_prints_and_returns_the_same(daemon, job, example):
    daemon.wait(job, "finished")
    arguments = example.format(job=job).split()
    before = server(daemon)
    found = run(WARMD, *arguments, home=daemon.home.path)
    assert server(daemon) == before
    assert found == run(HERE, *arguments, home=daemon.home.path)


def test_the_client_of_a_forwarded_command_imports_next_to_nothing(daemon):
    timed = [sys.executable, "-X", "importtime", "-m", "warmd.cli"]
    _, _, err = run(timed, "jobs", home=daemon.home.path)
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines() if "|" in line}
    assert "warmd.cli.warm.forward" in imported
    assert imported.isdisjoint(
        {"redis", "rq", "numpy", "ssl", "asyncio", "click", "orjson", "typing", "dataclasses"}
    )
    assert not [name for name in imported if name.startswith(("warmd.daemon", "warmd.jobs"))]


@pytest.mark.slow
def test_the_server_has_imported_what_commands_use(daemon, job):
    daemon.wait(job, "finished")
    arguments = [example.format(job=job).split() for example in (*EXAMPLES, *CHANGING)]
    # With --json the standard output must have a binary buffer.
    arguments = [words for words in arguments if "--json" not in words]
    code, out, err = run(
        [sys.executable, "-c", IMPORTS], json.dumps(arguments), home=daemon.home.path
    )
    assert code == 0, err
    found = {line.rpartition("]")[2].strip() for line in out.splitlines()}
    assert len(out.splitlines()) == len(arguments)
    assert found <= {"", "click._textwrap"}


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/home/ada"},
        {"HOME": "/home/ada", "XDG_STATE_HOME": "/state"},
        {"HOME": "/home/ada", "XDG_STATE_HOME": "relative"},
        {"HOME": "/home/ada", "XDG_STATE_HOME": ""},
    ],
)
def test_the_default_home_is_that_of_the_settings(environ, monkeypatch):
    for name in ("XDG_STATE_HOME", "WARMD_HOME", "WARMD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert forward._home(["queue"]) == str(load(environ=environ, reads_home=False).home)


def test_every_command_is_tried():
    assert {example.split()[0] for example in EXAMPLES} | {"status"} >= COMMANDS


@pytest.mark.slow
def test_a_fork_has_environment_folder_and_umask_of_its_caller(daemon, job, tmp_path):
    daemon.wait(job, "finished")
    home = daemon.home.path
    times = {
        zone: run(WARMD, "jobs", "--all", home=home, TZ=zone)[1]
        for zone in ("Asia/Tokyo", "America/New_York")
    }
    assert times["Asia/Tokyo"] != times["America/New_York"]
    for zone, seen in times.items():
        assert seen == run(HERE, "jobs", "--all", home=home, TZ=zone)[1]
    relative = os.path.relpath(home, tmp_path)
    arguments = ("show", job, "--home", relative)
    assert run(WARMD, *arguments, home=tmp_path, folder=tmp_path)[0] == 0
    plotted = ("plot", job, "--output", "curve.html")
    if run(HERE, *plotted, home=home, folder=tmp_path)[0] == 0:
        mode = (tmp_path / "curve.html").stat().st_mode
        (tmp_path / "curve.html").unlink()
        assert run(WARMD, *plotted, home=home, folder=tmp_path)[0] == 0
        assert (tmp_path / "curve.html").stat().st_mode == mode


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii:backslashreplace", "utf-16", "ascii"])
def test_a_fork_encodes_as_its_caller(daemon, job, encoding):
    run(HERE, "show", job, "--note", "größe", home=daemon.home.path)
    found, expected = (
        run(
            command,
            "show",
            job,
            home=daemon.home.path,
            encoding="latin1",
            PYTHONIOENCODING=encoding,
        )
        for command in (WARMD, HERE)
    )
    assert found[:2] == expected[:2]


@pytest.mark.slow
def test_a_terminal_gets_its_width_and_colors(daemon, job):
    daemon.wait(job, "finished")
    environ = {"WARMD_HOME": str(daemon.home.path), "TERM": "xterm"}
    for columns in ("60", "200"):
        seen = seen_on_a_terminal("jobs", "--all", **environ, COLUMNS=columns)
        assert job in seen
        assert "\x1b[" in seen
        assert max(map(len, seen.splitlines())) <= int(columns) + 20  # codes of colors
    assert "\x1b[" not in seen_on_a_terminal("jobs", **environ, NO_COLOR="1")


@pytest.mark.slow
def test_a_shell_gets_completions(daemon, job):
    daemon.wait(job, "finished")
    found, expected = (
        run(
            command,
            home=daemon.home.path,
            _WARMD_COMPLETE="bash_complete",
            COMP_WORDS=f"warmd show {job[:12]}",
            COMP_CWORD="2",
        )
        for command in (WARMD, HERE)
    )
    assert job in found[1]
    assert found == expected


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command(daemon, job):
    daemon.wait(job, "finished")
    environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(daemon.home.path)}
    command = f"{sys.executable} -m warmd.cli show {job} --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_as_without_the_server(daemon, streams):
    environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(daemon.home.path)}
    done = [
        subprocess.run(
            ["bash", "-c", f'"$@" {streams}', "bash", *command, "queue"],
            env=environ,
            capture_output=True,
            text=True,
        )
        for command in (WARMD, HERE)
    ]
    assert done[0].returncode == done[1].returncode
    assert done[0].stdout == done[1].stdout


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-O", "-Xutf8=0", "-Wdefault"])
def test_another_python_runs_the_command_itself(daemon, option):
    command = [sys.executable, option, "-m", "warmd.cli"]
    assert run(command, "queue", home=daemon.home.path)[0] == 0


@pytest.mark.slow
def test_following_a_job_survives_the_daemon(sturdy: Daemon):
    warm_up(sturdy)
    job = hold(sturdy)
    environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(sturdy.home.path)}
    command = [*WARMD, "tail", job]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline()
        sturdy.stop(now=True)
        let_go(sturdy)
        sturdy.start()
        assert b"finished" in follower.stdout.read()


@pytest.mark.slow
def test_a_killed_server_is_started_again(sturdy: Daemon):
    first = warm_up(sturdy)
    first.kill()
    wait_until(lambda: gone(first))
    assert run(WARMD, "queue", home=sturdy.home.path)[0] == 0
    wait_until(lambda: is_warm(sturdy), timeout_s=30)
    assert server(sturdy) != first


@pytest.mark.slow
def test_the_daemon_ends_its_server(sturdy: Daemon):
    found = warm_up(sturdy)
    sturdy.stop()
    assert gone(found)
    found_again = run(WARMD, "jobs", home=sturdy.home.path)
    assert "no daemon runs" in found_again[2]
    assert found_again == run(HERE, "jobs", home=sturdy.home.path)


@pytest.mark.slow
def test_the_server_leaves_when_its_code_changes(
    make_daemon: Callable[..., Daemon], tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    daemon = make_daemon()
    daemon.start()
    path = os.environ["PYTHONPATH"]
    run(WARMD, "queue", home=daemon.home.path, PYTHONPATH=path)
    wait_until(lambda: is_warm(daemon), timeout_s=30)
    first = server(daemon)
    assert first is not None
    (tmp_path / "another.py").touch()  # as an installation does
    assert run(WARMD, "queue", home=daemon.home.path, PYTHONPATH=path)[0] == 0
    wait_until(lambda: gone(first))


def serve_briefly(folder: Path, idle_s: float) -> subprocess.Popen[bytes]:
    code = f"from {MODULE} import main; import {MODULE} as server; server.IDLE_S = {idle_s}; main()"
    (folder / "sockets").mkdir(mode=0o700, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(os.getpid())], stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_an_idle_server_ends(tmp_path):
    with serve_briefly(tmp_path, 0.5) as process:
        assert process.wait(30) == 0
    assert not (tmp_path / "sockets" / SOCKET).exists()


@pytest.fixture
def callers(daemon: Daemon) -> Iterator[Callable[[], socket.socket]]:
    opened = []

    def call() -> socket.socket:
        caller = socket.socket(socket.AF_UNIX)
        caller.settimeout(10)
        caller.connect(str(daemon.home.sockets / SOCKET))
        opened.append(caller)
        return caller

    yield call
    for one in opened:
        one.close()


def request_of(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv("WARMD_HOME", str(daemon.home.path))
    code = (
        "import sys; from warmd.cli.warm.request import Request; "
        "sys.stdout.buffer.write(Request.of_this_process(['queue']).encode())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout


@pytest.mark.parametrize("says_go", [True, False])
def test_a_client_that_has_given_up_gets_no_output(daemon, callers, monkeypatch, says_go):
    reader, writer = os.pipe()
    with callers() as caller:
        socket.send_fds(caller, [request_of(daemon, monkeypatch)], [0, writer, writer])
        os.close(writer)
        assert psutil.pid_exists(int.from_bytes(caller.recv(8), "big"))
        if says_go:
            caller.sendall(GO)
            assert caller.recv(2) == b"d\0"
    with open(reader) as stream:
        assert bool(stream.read()) == says_go


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\xff" * 8,
        (1 << 60).to_bytes(8, "big") + b"x",
        (5).to_bytes(8, "big") + b"a\0b\0c",
    ],
)
def test_garbage_does_no_harm(daemon, callers, data):
    before = server(daemon)
    with callers() as caller:
        socket.send_fds(caller, [data or b"\0"], [0, 1, 2])
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(8) == b""
    silent = callers()  # sends nothing, and stays
    assert run(WARMD, "queue", home=daemon.home.path)[0] == 0
    assert server(daemon) == before
    silent.close()


def fork_that_asks(found: psutil.Process) -> psutil.Process | None:
    """The fork of a server that has connections to its client and to the supervisor."""
    for child in found.children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # of a client that was quick
            if len(child.net_connections("unix")) > 1:
                return child
    return None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command(sturdy: Daemon, number: int):
    found = warm_up(sturdy)
    environ = {**CLEAN_ENVIRON, "WARMD_HOME": str(sturdy.home.path)}
    supervisor = psutil.Process(sturdy.pid("supervisor"))
    supervisor.suspend()
    try:
        # The tests themselves may have been started with signals ignored, as by nohup.
        command = ["env", "--default-signal", *WARMD, "models"]
        asking = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
        fork = wait_until(lambda: fork_that_asks(found))
        asking.send_signal(number)
        assert asking.wait(10) == (130 if number == signal.SIGINT else -number)
        wait_until(lambda: gone(fork))
    finally:
        supervisor.resume()


LISTEN = """
import os, socket, sys
os.makedirs(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{sys.argv[1]}/commands.sock")
os.chmod(f"{sys.argv[1]}/commands.sock", 0o777)
listener.listen()
print("ready", flush=True)
print(listener.accept()[0].recv(1 << 20))
"""


@pytest.mark.slow
def test_another_users_socket_gets_nothing():
    another_user()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        command = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
        command += ["/usr/bin/python3", "-c", LISTEN, f"{folder}/sockets"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            run(WARMD, "queue", home=Path(folder))
            assert other.stdout.readline() == "b''\n"
