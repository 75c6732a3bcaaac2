"""The cache folder for machine code and measurements, which are made once per machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import xxhash

_ROOM_BYTES = 16 * 2**20  # required free space: several times the stored size


@lru_cache(maxsize=1)
def folder() -> Path | None:
    """Return the cache folder, named by a digest of the sources; None if nothing can be written.

    It is next to the bytecode, or else in the user's cache folder.
    """
    here = Path(__file__).parent
    made_by = [*sorted((here / "native").glob("*.py")), here / "levels.py", here / "quantized.py"]
    sources = b"".join(path.read_bytes() for path in made_by)
    name = f"warmd-{xxhash.xxh3_128_hexdigest(sources)}"
    for parent in (here / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))):
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
            found = parent.expanduser() / name
            found.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=found):
                pass
            if shutil.disk_usage(found).free > _ROOM_BYTES:
                return found
    return None
