"""File descriptors: the limit of open files, and connections for which none is free."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

from ...jobs.files.shortage import Shortage, shortage

_MAX_FILES = 65_536  # open files of a process; a higher limit makes some programs slow
_PAUSE_S = 0.1  # before the next try, where the reserved descriptor is gone as well

log = logging.getLogger(__name__)


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Acceptor:
    """Accepts connections; one descriptor is reserved for those for which none is free."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._reserved = os.open(os.devnull, os.O_RDONLY)

    def accept(self, serve: Callable[[socket.socket, Shortage], None]) -> socket.socket | None:
        """Return a new connection; None if no descriptor was free for it.

        In that case `serve` has answered it on the reserved descriptor, and it is closed.
        """
        try:
            connection, _ = self._listener.accept()
            return connection
        except OSError as error:
            lacking = shortage(error)
            if lacking is None:
                raise
        log.error("a connection waits for %s: %s", lacking.what, lacking.reason)
        self.close()
        try:
            connection, _ = self._listener.accept()
            with connection:
                serve(connection, lacking)
        except OSError as error:  # another process has taken it, or the caller has gone
            log.error("a connection is not answered: %s", error)
            time.sleep(_PAUSE_S)
        finally:
            with contextlib.suppress(OSError):
                self._reserved = os.open(os.devnull, os.O_RDONLY)
        return None

    def close(self) -> None:
        """Release the reserved descriptor."""
        if self._reserved >= 0:
            os.close(self._reserved)
            self._reserved = -1
