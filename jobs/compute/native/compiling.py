"""Compiles functions with numba and caches the machine code by a digest of the sources.

numba invalidates the cache of a function when its source file changes, but not when the file of a
function that it calls changes. So the cache folder is named by a digest of all sources
(`cache.folder`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numba
from numba import types

from .. import cache

_Function = Callable[..., Any]
_CONFIG: Any = numba.config


class Entry(Protocol):
    """A compiled C function `void f(int64 *words)`, to be run by `openmp.OpenMP`."""

    address: int


def compiled(function: _Function) -> _Function:
    """Decorator: compile a function that other compiled functions call."""
    machine_code: _Function = _cached(numba.njit, function)
    return machine_code


def entry(function: Callable[[Any], None]) -> Entry:
    """Decorator: compile a function that Python calls by its address."""
    c_function: Entry = _cached(numba.cfunc, function, types.void(types.voidptr))
    return c_function


def _cached(decorator: Any, function: _Function, *signature: Any) -> Any:
    folder = cache.folder()
    options = {"cache": folder is not None, "error_model": "numpy"}
    before = {name: getattr(_CONFIG, name) for name in ("CACHE_DIR", "DISABLE_JIT")}
    _CONFIG.CACHE_DIR, _CONFIG.DISABLE_JIT = str(folder or ""), 0
    try:
        return decorator(*signature, **options)(function)
    except Exception:
        # A damaged cache can make numba raise any exception. Deleting its files costs only time; an
        # error in the function itself is raised again by the second attempt. The measurements of
        # the processor in this folder stay: other processes read them.
        if folder is None:
            raise
        for path in folder.rglob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        return decorator(*signature, **options)(function)
    finally:
        for name, value in before.items():
            setattr(_CONFIG, name, value)
