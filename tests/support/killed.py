"""Work that is killed in the middle: a child process ends itself with SIGKILL."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from redis.connection import AbstractConnection


def killed_at_call(instant: int, work: Callable[[], object]) -> bool:
    """Do some work in a child that kills itself at its n-th file-system call.

    `instant`: n, from 1 on. Returns whether the child was killed; False: the work has fewer calls,
    and was done. Raises AssertionError if it failed.
    """

    def count(kill_at: Callable[[], None]) -> None:
        def audit(event: str, args: object) -> None:
            if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
                kill_at()

        sys.addaudithook(audit)

    return _killed(instant, count, work)


def killed_at_command(instant: int, work: Callable[[], object]) -> bool:
    """The same with Redis: it is killed before the n-th instant at which it talks to it.

    Each pipeline or command is two instants: before it is sent, and after Redis has executed it.
    """

    def count(kill_at: Callable[[], None]) -> None:
        send: Any = AbstractConnection.send_packed_command

        def counted(self: AbstractConnection, *args: Any, **how: Any) -> None:
            kill_at()
            send(self, *args, **how)
            reply: Any = self._sock
            select.select([reply], [], [], 20.0)  # when it is there, Redis has executed it
            kill_at()

        setattr(AbstractConnection, "send_packed_command", counted)  # noqa: B010

    return _killed(instant, count, work)


def _killed(
    instant: int, count: Callable[[Callable[[], None]], None], work: Callable[[], object]
) -> bool:
    child = os.fork()
    if child == 0:
        seen = 0

        def kill_at() -> None:
            nonlocal seen
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            count(kill_at)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
