"""The client's half: finds the command server of a home and waits for its reply.

Imports the standard library only, and of that as little as possible: its imports are most of what
a command costs the client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

from .request import COLD, DONE, GO, SOCKET, Request

# Commands that end soon. Most only read; none starts, stops or replaces the daemon.
COMMANDS = frozenset(
    ("diff", "jobs", "models", "plot", "queue", "result", "samples", "show", "status", "tail")
)
COMPLETE = "_WARMD_COMPLETE"  # the variable with which a shell asks click for completions

_REPLY_S = 2.0  # for a fork of the command server to take the request
_START = b'{"op":"start_commands"}\n'
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(arguments: Sequence[str], cold: Callable[[], int]) -> int:
    """Run a command and return its exit code: by the command server, or by `cold`.

    After a command that could have been forwarded, the daemon is asked to start the server.
    """
    home = _home(arguments)
    if home is None:
        return cold()
    sockets = os.path.realpath(os.path.join(home, "sockets"))  # a long home has them elsewhere
    try:
        connection = _connect(os.path.join(sockets, SOCKET))
    except OSError:
        code = cold()
        with contextlib.suppress(OSError), _connect(os.path.join(sockets, "control.sock")) as asked:
            asked.sendall(_START)
        return code
    with connection:
        reply = _forward(connection, arguments)
    return cold() if reply is None else reply


def _home(arguments: Sequence[str]) -> str | None:
    """Return the home of a command that can be forwarded; None for all others."""
    if os.environ.get("WARMD_CONFIG") or not all((sys.stdin, sys.stdout, sys.stderr)):
        return None  # the file may name the home; a stream is closed
    home, command, only_prints = None, None, COMPLETE in os.environ
    words = iter(arguments)
    for word in words:
        if word == "--":
            break
        if word in ("-h", "--help", "--version"):
            only_prints = True
        elif word == "--home":
            home = next(words, "")
        elif word.startswith("--home="):
            home = word.partition("=")[2]
        elif command is None and not word.startswith("-"):
            command = word
    if command not in COMMANDS and not only_prints:
        return None
    if home is not None:
        return home or None
    return os.environ.get("WARMD_HOME") or _default_home()


def _default_home() -> str | None:
    """Return the default home as configs/config.py does, whose import takes 10 ms."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        if not (home := os.environ.get("HOME", "")):
            return None
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "warmd")


def _connect(path: str) -> socket.socket:
    """Connect to a process of this user. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_REPLY_S)
        connection.connect(path)
        if sys.platform == "linux":
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(peer[4:8], sys.byteorder) != os.geteuid():
                raise PermissionError("the process that listens belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _forward(connection: socket.socket, arguments: Sequence[str]) -> int | None:
    """Let the server run the command; return its exit code, None if it has to run here."""
    try:
        data = Request.of_this_process(arguments).encode()
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        pid = int.from_bytes(connection.recv(8), "big")  # of the fork
        if pid == 0:  # it has ended
            return None
        with _signals_to(pid):
            connection.sendall(GO)
            connection.settimeout(None)
            reply = connection.recv(2)
    except OSError:
        return None
    if reply == COLD:
        return None
    if reply[:1] == DONE:
        return reply[1]
    sys.stderr.write("Error: the process that ran this command was killed: try again\n")
    return 1


@contextlib.contextmanager
def _signals_to(pid: int) -> Iterator[None]:
    """Pass the signals that end a command on to the process that runs it."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    passed = [one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
