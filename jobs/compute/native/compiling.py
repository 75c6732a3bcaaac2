"""Compiles functions with numba and caches the machine code by a digest of the sources.

numba invalidates a function's cache by its own source file, not by those of functions that it
calls. So the cache folder is named by a digest of all of them (`cache.folder`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Protocol

import numba
from numba import types

from .. import cache

_Function = Callable[..., Any]
_CONFIG: Any = numba.config


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
    folder = cache.folder()
    options = {"cache": folder is not None, "error_model": "numpy"}
    before = {name: getattr(_CONFIG, name) for name in ("CACHE_DIR", "DISABLE_JIT")}
    _CONFIG.CACHE_DIR, _CONFIG.DISABLE_JIT = str(folder or ""), 0
    try:
        return decorator(*types_of_it, **options)(function)
    except Exception:
        # Any error: numba raises whatever a damaged cache makes it run into, and the cache can be
        # deleted. An error of the function itself is raised again by the second attempt.
        if folder is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return decorator(*types_of_it, **options)(function)
    finally:
        for name, value in before.items():
            setattr(_CONFIG, name, value)
