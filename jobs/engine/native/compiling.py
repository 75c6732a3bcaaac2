"""Compiles functions, once for each state of the sources.

numba keeps machine code beside the source as Python keeps bytecode. It looks at the file of a
function, but not at those that the function calls. So what it keeps lies in a folder that is named
after all of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numba
import xxhash
from numba import types

_Function = Callable[..., Any]
_CONFIG: Any = numba.config
_ROOM_BYTES = 16 * 2**20  # several times what is kept


class Entry(Protocol):
    """A C function of a pointer to words, for a Team to run."""

    address: int


def compiled(function: _Function) -> _Function:
    """Decorate a function that others here call."""
    function_of: _Function = _kept(numba.njit, function)
    return function_of


def entry(function: Callable[[Any], None]) -> Entry:
    """Decorate a function that is called from outside."""
    c_function: Entry = _kept(numba.cfunc, function, types.void(types.voidptr))
    return c_function


def _kept(decorator: Any, function: _Function, *types_of_it: Any) -> Any:
    folder = _folder()
    options = {"cache": folder is not None, "error_model": "numpy"}
    before = {name: getattr(_CONFIG, name) for name in ("CACHE_DIR", "DISABLE_JIT")}
    _CONFIG.CACHE_DIR, _CONFIG.DISABLE_JIT = str(folder or ""), 0
    try:
        return decorator(*types_of_it, **options)(function)
    except Exception:
        # Any error at all: what is kept on disk may be spoilt in whatever way, and is not needed.
        # An error of the compiling itself is raised again by the second try.
        if folder is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return decorator(*types_of_it, **options)(function)
    finally:
        for name, value in before.items():
            setattr(_CONFIG, name, value)


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    """Where machine code is kept; None where nothing can be written."""
    here = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    name = f"warmd-{xxhash.xxh3_128_hexdigest(sources)}"
    for parent in (here / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))):
        with suppress(OSError, RuntimeError):  # the latter: no home
            folder = parent.expanduser() / name
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if shutil.disk_usage(folder).free > _ROOM_BYTES:
                return folder
    return None
