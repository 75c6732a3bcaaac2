"""The labels of this machine, and the name under which its daemon is known as a node."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from hashlib import blake2b

from ... import __version__
from ...configs import gpus
from ...configs.memory import memory_bytes
from ...configs.values import num_cores
from ...jobs.libraries import versions
from .home import Home

_LONGEST_NAME = 50


def machine_name() -> str:
    """Return the host's name, in the characters of labels."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).strip("-._")[:_LONGEST_NAME]
    return name or "localhost"


def node_name(home: Home) -> str:
    """Return the name of this home's daemon: unique, and the same after every restart."""
    return f"{machine_name()}-{home.key}"


def machine_labels(configured: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of this machine; configured ones replace those found out here."""
    found = {
        "arch": platform.machine() or "unknown",
        "cores": str(num_cores()),
        "gpus": str(gpus.visible()),
        "machine": machine_name(),
        "memory": str(memory_bytes()),
    }
    return dict(sorted({**found, **configured}.items()))


# Version of what ranks on several nodes send to each other (jobs/training/gloo_group.py).
# 1: pickles, without a proof of the secret.
RANK_EXCHANGE = 2


def software_label() -> str:
    """Return warmd's version with a digest of what the nodes of a job must have in common.

    That is the versions of all libraries that compute, and the exchange between ranks.
    """
    text = repr((__version__, RANK_EXCHANGE, sorted(versions().items())))
    return f"{__version__}-{blake2b(text.encode(), digest_size=6).hexdigest()}"
