"""The children of a process that run a module."""

from __future__ import annotations

from contextlib import suppress

import psutil


def running(module: str, *, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the children of `parent` (None: this process) that run `-m module`.

    Their own children do not count: a daemon that another test keeps has such processes, too. Nor
    do children that have ended and that nobody has waited for.
    """
    found = []
    for child in (parent or psutil.Process()).children():
        with suppress(psutil.NoSuchProcess):  # a zombie's command line cannot be read either
            if module in child.cmdline():
                found.append(child)
    return found
