"""The libraries that compute, and their versions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

_NAMES = ("warmd", "torch", "transformers", "trl", "accelerate", "numpy")


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the libraries, as they were installed at this process's first call.

    The zygote calls it when it has imported them: its children have what it imported, whatever is
    installed later.
    """
    found = {}
    for name in _NAMES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return MappingProxyType(found)
