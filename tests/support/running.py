"""The children of a process that run a module."""

from __future__ import annotations

from contextlib import suppress

import psutil


def running(module: str, *, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children of `parent` (None: this process) that run `-m module`.

    Grandchildren do not count: the daemon of another test has such processes, too. Nor do zombie
    processes.
    """
    found = []
    for child in (parent or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):  # a zombie's command line cannot be read either
            if module in child.cmdline():
                found.append(child)
    return found
