"""Delivery of one notification: to a webhook (HTTP POST of JSON), by Apprise or to a command.

Messages about a delivery never contain the target: it may hold a token.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from ...jobs.files import umask
from . import by_apprise

_TIMEOUT_S = 20.0  # of one attempt
_DELAYS_S = (2.0, 10.0)  # before the second and the third attempt
_BY_APPRISE = "apprise:"  # begins the target; an address of Apprise follows
_COMMAND = "WARMD_COMMAND"
_SHELL = f'command=${_COMMAND}; unset {_COMMAND}; eval "$command"'
_APPRISE_PROBLEMS = {
    by_apprise.NOT_INSTALLED: "apprise is not installed: pip install 'warmd[apprise]'",
    by_apprise.UNKNOWN: "apprise knows no service with such an address",
    by_apprise.REFUSED: "apprise could not deliver it",
}


@dataclass(frozen=True, kw_only=True)
class Notification:
    """An event of a job; `text` describes it in one line, as chat services expect."""

    text: str
    event: str
    job: str
    name: str | None = None
    tags: tuple[str, ...] = ()
    step: int | None = None
    error: str | None = None
    time: float
    host: str


def sample() -> Notification:
    """Return the notification that `warmd doctor --notify` delivers."""
    host = socket.gethostname()
    text = f"warmd on {host}: test notification"
    return Notification(text=text, event="test", job="test", time=round(time.time(), 3), host=host)


def deliver(
    target: str,
    notification: Notification,
    *,
    timeout_s: float = _TIMEOUT_S,
    wait: Callable[[float], object] = time.sleep,
) -> str | None:
    """Deliver a notification, with two more attempts if that fails; return the last problem.

    None: it was delivered. `wait` is called with the seconds between two attempts.
    """
    for delay_s in (*_DELAYS_S, None):
        problem = _attempt(target, notification, timeout_s)
        if problem is None or delay_s is None:
            return problem
        wait(delay_s)
    raise AssertionError


def _attempt(target: str, notification: Notification, timeout_s: float) -> str | None:
    if target.startswith(("http://", "https://")):
        return _post(target, orjson.dumps(asdict(notification)), timeout_s)
    if target.startswith(_BY_APPRISE):
        return _send(target.removeprefix(_BY_APPRISE), notification, timeout_s)
    return _run(target, notification, timeout_s)


def _post(url: str, body: bytes, timeout_s: float) -> str | None:
    headers = {"Content-Type": "application/json", "User-Agent": "warmd"}
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"the webhook replied with HTTP status {error.code}"
    except (OSError, ValueError) as error:  # ValueError: no URL, which the message would show
        reason = error.reason if isinstance(error, urllib.error.URLError) else type(error).__name__
        return f"the webhook cannot be reached: {reason}"


def _send(address: str, notification: Notification, timeout_s: float) -> str | None:
    """Send the text by Apprise, whose services are chat, mail, telephones and many more."""
    request = orjson.dumps({"address": address, "text": notification.text})
    command = [sys.executable, "-m", by_apprise.__name__]
    code = _ended(command, request, dict(os.environ), timeout_s)
    if code is None:
        return f"apprise took longer than {timeout_s:g} s"
    return _APPRISE_PROBLEMS.get(code, f"apprise ended with exit code {code}") if code else None


def _run(command: str, notification: Notification, timeout_s: float) -> str | None:
    """Run the command in a shell: JSON on stdin, its parts in WARMD_* variables.

    The shell gets the command by a variable: arguments of processes can be read by other users.
    """
    variables = {
        "WARMD_TEXT": notification.text,
        "WARMD_EVENT": notification.event,
        "WARMD_JOB": notification.job,
        "WARMD_NAME": notification.name or "",
        "WARMD_ERROR": notification.error or "",
    }
    variables = {name: text.replace("\0", " ") for name, text in variables.items()}
    environment = {**os.environ, **variables, _COMMAND: command}
    document = orjson.dumps(asdict(notification))
    code = _ended(["/bin/sh", "-c", _SHELL], document, environment, timeout_s)
    if code is None:
        return f"the command took longer than {timeout_s:g} s"
    return f"the command ended with exit code {code}" if code else None


def _ended(
    command: Sequence[str], given: bytes, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a command, `given` on stdin; return its exit code, None if it had to be killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        umask=umask.of_user(),
    )
    try:
        process.communicate(given, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        process.wait()
        return None
    return process.returncode
