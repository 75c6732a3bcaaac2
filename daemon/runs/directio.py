"""Direct I/O: writes large files past the page cache.

Files that are not read again soon need no copy in the page cache: on the development machine a
checkpoint written through the cache takes 1.8 s of a core for each gigabyte, past it 0.1 s.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Self

import xxhash

_BLOCK_BYTES = 8 << 20  # of one write
_ALIGNMENT = 4096  # of addresses, offsets and lengths, as the kernel requires


class DirectFile:
    """A new file that is written from its beginning to its end, with its checksum.

    If the file system does not support direct writes (tmpfs), or refuses them, the page cache is
    used.
    """

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._checksum = xxhash.xxh3_128()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._set_direct(True)
        # Not at import: it takes 12 MB, also in the processes that only read checkpoints.
        import numpy as np

        self._memory = mmap.mmap(-1, _BLOCK_BYTES)  # on a page's boundary
        self._block = np.frombuffer(self._memory, np.uint8)
        self._filled = 0

    @property
    def checksum(self) -> str:
        """The xxh3_128 of the bytes written."""
        return self._checksum.hexdigest()

    def write(self, data: Any) -> int:
        """Append the bytes of a buffer; they are copied before this returns."""
        import numpy as np  # copies without the GIL

        source = np.frombuffer(data, np.uint8)
        self._checksum.update(source.data)
        begin = 0
        while begin < len(source):
            count = min(len(source) - begin, _BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = source[begin : begin + count]
            self._filled += count
            begin += count
            if self._filled == _BLOCK_BYTES:
                self._write_block(_BLOCK_BYTES)
        self.size_bytes += len(source)
        return len(source)

    def flush(self) -> None:
        """Do nothing: libraries call it; the data is made durable by `close`."""

    def close(self) -> None:
        """Write the rest, and make the file durable."""
        if self._file < 0:
            return
        try:
            if self._filled:
                self._write_block(-(-self._filled // _ALIGNMENT) * _ALIGNMENT)
            os.ftruncate(self._file, self.size_bytes)
            os.fsync(self._file)
        finally:
            self._discard()

    def _write_block(self, count: int) -> None:
        written = 0
        while written < count:
            try:
                written += os.write(self._file, memoryview(self._memory)[written:count])
            except OSError as error:
                # Some file systems refuse only at the first write, or after a short one.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)
        self._filled = 0

    def _set_direct(self, wanted: bool) -> None:
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            wanted = False
        self._is_direct = wanted

    def _discard(self) -> None:
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()
