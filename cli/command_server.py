"""The command server: `python -m warmd.cli.command_server HOME PARENT`.

Imports what commands need, then forks for each connection; the fork takes over what the client's
process has inherited from its shell and runs the command. So this process itself holds no
connection to Redis, no file of a client and no thread, and a command cannot change the next one.
"""

from __future__ import annotations

import contextlib
import gc
import locale
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NoReturn

from ..daemon.host.channel import listen
from ..daemon.host.home import Home
from ..daemon.host.parent_death import end_with_parent
from ..jobs import KINDS, spec_class
from . import commands
from .main import main as run_command
from .warm.request import COLD, DONE, GO, SOCKET, Request, surroundings

IDLE_S = 600.0  # without a command, after which the server ends; it holds about 50 MB
_CLIENT_S = 2.0  # for the client to send its request, and to let it run

# What commands import in functions, so that others do without (complete: tests/cli/test_warm.py).
_IMPORTED_IN_FUNCTIONS = (
    *("warmd.cli.view.fetching", "warmd.daemon.client.client", "warmd.daemon.client.control"),
    *("warmd.daemon.client.groups", "warmd.daemon.client.jobs", "warmd.daemon.client.sweep_views"),
    *("warmd.daemon.groups.actions", "warmd.daemon.groups.scores"),
    *("warmd.daemon.reports.diff", "warmd.daemon.reports.digest"),
    *("warmd.daemon.reports.leaderboard", "warmd.daemon.runs.completions"),
    *("warmd.jobs.eval.journal", "warmd.jobs.grpo.completions", "warmd.jobs.libraries"),
    *("click.shell_completion", "msgspec", "difflib", "_strptime"),
)


def main() -> None:
    """Serve until the daemon ends, the code changes, or no command came for a while."""
    home = Home(Path(sys.argv[1]))
    end_with_parent(int(sys.argv[2]))
    preload()
    files = _modification_times()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal that has started the daemon
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # forks then copy fewer pages
    path = home.sockets / SOCKET
    with listen(path) as listener:
        listener.settimeout(IDLE_S)
        with contextlib.suppress(TimeoutError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    if _modification_times() != files:
                        break  # the client runs its command itself
                    if os.fork() == 0:
                        listener.close()
                        _serve(connection)
    path.unlink(missing_ok=True)


def preload() -> None:
    """Import what forwarded commands and the help of all commands use."""
    for module in iter_modules(commands.__path__):
        import_module(f"{commands.__name__}.{module.name}")
    for kind in KINDS:
        spec_class(kind)
    for name in _IMPORTED_IN_FUNCTIONS:
        import_module(name)


def _modification_times() -> Mapping[str, float]:
    """Return those of all modules, and of the folders in which distributions are installed."""
    files = [getattr(module, "__file__", None) for module in tuple(sys.modules.values())]
    found = {}
    for path in (*filter(None, files), *sys.path):
        with contextlib.suppress(OSError):  # in a zip file
            found[path] = os.stat(path).st_mtime
    return found


def _serve(connection: socket.socket) -> NoReturn:
    """Run the command of a client, in a fork of the server."""
    try:
        connection.settimeout(_CLIENT_S)
        request, streams = _receive(connection)
        connection.sendall(os.getpid().to_bytes(8, "big"))
        if connection.recv(1) == GO:
            connection.sendall(_run(request, streams, connection))
    except (OSError, ValueError):  # the client has gone, or is none
        pass
    finally:
        os._exit(0)


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return the request and the client's stdin, stdout and stderr. Raises OSError, ValueError."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    if len(streams) != 3 or len(data) < 8:
        raise ValueError("no request")
    size = int.from_bytes(data[:8], "big")
    body = bytearray(data[8:])
    while len(body) < size:
        if not (more := connection.recv(1 << 16)):
            raise ValueError("no whole request")
        body += more
    return Request.decode(bytes(body)), streams


def _run(request: Request, streams: list[int], connection: socket.socket) -> bytes:
    """Run the command in place of the client's process; return the reply."""

    def decline() -> NoReturn:
        connection.sendall(COLD)
        os._exit(0)

    try:
        if request.around != surroundings():
            return COLD
        os.chdir(request.folder)
    except OSError:
        return COLD
    _take_over(request, streams)
    try:
        code = run_command(request.arguments, decline=decline)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    with contextlib.suppress(OSError):  # a closed pipe
        sys.stdout.flush()
    return DONE + bytes([code & 0xFF])  # as the shell gets it


def _take_over(request: Request, streams: list[int]) -> None:
    """Make this process what Python makes of one that a shell has started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request.umask)
    os.environ.clear()
    for variable in request.environment:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    time.tzset()
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "")
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        encoding, errors = request.streams[2 * number : 2 * number + 2]
        opened = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            1 if number == 2 or os.isatty(number) else -1,  # by line
            encoding=encoding,
            errors=errors,
            newline="\n" if number else None,
        )
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    sys.argv = ["warmd", *request.arguments]


if __name__ == "__main__":
    main()
