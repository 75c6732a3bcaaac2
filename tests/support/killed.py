"""Work that is killed in the middle: a child process ends itself with SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def killed_at_call(instant: int, work: Callable[[], object]) -> bool:
    """Do some work in a child that kills itself at its n-th file-system call.

    `instant`: n, from 1 on. Returns whether the child was killed; False: the work has fewer calls,
    and was done. Raises AssertionError if it failed.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, args: object) -> None:
            nonlocal seen
            if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
                seen += 1
                if seen == instant:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
