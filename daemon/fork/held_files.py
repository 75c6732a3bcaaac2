"""Read leases on mapped files, so that another program's writes do not change warm weights.

Warm weights are private mappings of files. Writes to such a file in place show in the mapping, and
reading behind a truncated file's end kills the process with SIGBUS. A file that is replaced by a
rename, as safetensors does, stays unchanged for processes that have mapped it.

`HeldFiles` takes a read lease (fcntl(2), F_SETLEASE) on each file: a process that opens one for
writing waits until the lease is released, for up to /proc/sys/fs/lease-break-time (45 s), and this
process gets a signal. Leases need a local Linux file system and the file's owner; elsewhere nothing
is held, and the next job to begin notices the change (model_files.fingerprint).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ...configs.memory import available_bytes
from ...jobs.compute.source_pages import MAPPINGS
from ...jobs.errors import Conflict

log = logging.getLogger(__name__)

_MAYMOVE_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


class HeldFiles:
    """Read leases on files (fcntl F_SETLEASE), until they are released or the process ends.

    When another process opens such a file for writing, it waits, and this process gets SIGIO, which
    ends it unless it has a handler. Then call `release` or `copy_wanted`.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises Conflict when a file is being written to."""
        self._held: dict[int, tuple[Path, os.stat_result]] = {}  # by descriptor
        self._is_called = self._is_copying = False  # see `copy_wanted`
        for path in paths if hasattr(fcntl, "F_SETLEASE") else ():
            self._hold(path, path)

    def _hold(self, place: Path | str, path: Path) -> None:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError as error:
            os.close(fd)
            raise Conflict(f"model: {path} is being written to: wait until that is done") from error
        except OSError as error:  # not ours, or a file system without leases
            os.close(fd)
            log.debug("no lease on %s: %s", path, error)
        else:
            self._held[fd] = path, os.fstat(fd)

    def renew(self) -> None:
        """In a fork: hold the files by leases of its own.

        Raises Conflict when one was written to since the parent began to hold it.
        """
        inherited, self._held = self._held, {}
        for fd, (path, then) in inherited.items():
            self._hold(f"/proc/self/fd/{fd}", path)  # the same file, even if it was renamed
            now = os.fstat(fd)
            os.close(fd)
            if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
                raise Conflict(f"model: {path} was written to after it was loaded: submit again")

    def close(self) -> None:
        """Close the descriptors: in a fork, the parent still holds the files then."""
        for fd in self._held:
            os.close(fd)
        self._held = {}

    def is_wanted(self) -> bool:
        """Whether another process waits to write to one of the files."""
        return any(map(_is_wanted, self._held))

    def release(self) -> None:
        """Release all leases: other processes can write."""
        for fd in list(self._held):
            self._release(fd)

    def copy_wanted(self) -> None:
        """Copy the mappings of files that other processes wait to write, then release their leases.

        Addresses do not change. No thread may write to the mappings meanwhile. Raises MemoryError
        if there is too little memory; the files are still held then.

        A signal handler may call it while it runs: then the files are looked at once more.
        """
        self._is_called = True
        while self._is_called and not self._is_copying:
            self._is_called = False  # before _is_copying: a call in between copies by itself
            self._is_copying = True
            try:
                for fd in filter(_is_wanted, list(self._held)):
                    path, found = self._held[fd]
                    copied = sum(_detach(*area) for area in _mappings(found.st_ino))
                    log.warning("%s is written to: %d bytes stay, as a copy", path, copied)
                    self._release(fd)
            finally:
                self._is_copying = False

    def _release(self, fd: int) -> None:
        del self._held[fd]
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(fd)


def _is_wanted(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK


def _mappings(inode: int) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of this process's private mappings of data of a file.

    The device is not compared: some file systems (btrfs) report another one here than stat does.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, found, *_ = line.split()
        if found == str(inode) and permissions in ("rw-p", "r--p"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield begin, end - begin


def _detach(address: int, num_bytes: int) -> int:
    """Replace a mapping by memory with the same content; return its size in bytes."""
    if available_bytes() < num_bytes:
        raise MemoryError(f"no room for {num_bytes} bytes of weights")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = libc.memcpy.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    libc.mremap.argtypes = (ctypes.c_void_p, *2 * (ctypes.c_size_t,), ctypes.c_int, ctypes.c_void_p)
    libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if copy == ctypes.c_void_p(-1).value:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    with MAPPINGS:
        libc.memcpy(copy, address, num_bytes)
        moved = libc.mremap(copy, num_bytes, num_bytes, _MAYMOVE_FIXED, address)
    if moved != address:
        raise MemoryError(os.strerror(ctypes.get_errno()))
    return num_bytes
