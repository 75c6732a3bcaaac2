"""The processes of a module among the descendants of a process."""

from __future__ import annotations

from contextlib import suppress

import psutil


def running(module: str, *, below: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the descendants of a process (None: this one) that run `-m module`.

    Those that have ended, also those of other tests that nobody has waited for, do not count.
    """
    found = []
    for child in (below or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie's command cannot be read either
            if module in child.cmdline():
                found.append(child)
    return found
