"""Cache folders for code: warmd's machine code and measurements, and what libraries compile.

Processes run what they find there, so no other user may be able to change it.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import xxhash

from ...configs import ownership
from ..files.atomic import make_folder

log = logging.getLogger(__name__)

_ROOM_BYTES = 16 * 2**20  # required free space: several times the stored size

# Their defaults are in /tmp, at a path that another user can create first, or in folders that are
# often shared. Inductor's has pickles.
_LIBRARIES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "HF_MODULES_CACHE": "huggingface_modules",
}


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
            found = parent.expanduser().absolute() / name
            if not protect(found):
                continue
            with tempfile.TemporaryFile(dir=found):
                pass
            if shutil.disk_usage(found).free > _ROOM_BYTES:
                return found
    return None


def protect(cache: Path) -> bool:
    """Create a folder for code; empty it if other users could have changed it.

    Returns whether they cannot now. Raises OSError.
    """
    make_folder(cache)
    if ownership.is_single_user():
        return True
    changes = ownership.narrow(cache)
    for exposed in ownership.exposures(cache):
        log.info("cache: %s is not used: %s", cache, exposed.reason)
        return False
    users = ownership.trusted()
    if changes or any(path.lstat().st_uid not in users for path in cache.rglob("*")):
        log.warning("cache: %s is emptied: other users could change it", cache)
        shutil.rmtree(cache)
        make_folder(cache)
    return True


def keep_library_caches(caches: Path | None = None) -> None:
    """Let libraries that this process or its children import later cache code below `caches`.

    None: in the cache folder. Where that is impossible (a full disk), below a new temporary folder.
    Raises OSError.
    """
    place = folder() if caches is None else caches
    try:
        is_safe = place is not None and protect(place)
    except OSError as error:
        log.warning("cache: %s is not used: %s", place, error)
        is_safe = False
    if place is None or not is_safe:
        place = Path(tempfile.mkdtemp(prefix="warmd-"))
    # A variable that is set is not respected: torch sets its own to the folder in /tmp, and a
    # daemon that a program with torch starts inherits it.
    os.environ.update({variable: str(place / name) for variable, name in _LIBRARIES.items()})
