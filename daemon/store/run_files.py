"""The files of a run directory that can be kept in the store.

Code of users may leave anything there. Entries that are not readable files (a pipe, a socket, a
device, a broken or forbidden link), and names that are not UTF-8, stay on this machine.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)


def files(folder: Path, *, without: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield the relative path and the path of each file, hidden ones left out.

    `without`: names of top-level files and folders that are also left out.
    """
    for root, folders, names in os.walk(folder):
        left_out = without if Path(root) == folder else ()
        folders[:] = [n for n in folders if not n.startswith(".") and n not in left_out]
        for name in names:
            path = Path(root, name)
            if name.startswith(".") or name in left_out or not os.path.lexists(path):
                continue  # the last: it was removed meanwhile
            if (problem := _problem(path)) is not None:
                _warn(str(path).encode(errors="backslashreplace").decode(), problem)
            else:
                yield str(path.relative_to(folder)), path


def _problem(path: Path) -> str | None:
    try:
        str(path).encode()
        if not stat.S_ISREG(path.stat().st_mode):
            return "not a regular file"
        return None if os.access(path, os.R_OK) else "not readable"
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    except OSError as error:
        return str(error.strerror)


@lru_cache(maxsize=1000)
def _warn(path: str, problem: str) -> None:
    """Log a file that is not uploaded, once."""
    log.warning("run store: %s stays on this machine: %s", path, problem)
